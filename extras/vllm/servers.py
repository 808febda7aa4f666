"""Episodes that vLLM servers sample: `--sampler http://host:8000[,http://other:8000]`.

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora --max-lora-rank 16 \
        --max-loras 3 --logprobs-mode processed_logprobs --generation-config vllm

A server, this one or `python agent.py --serve`, is started with the run's base model. It reads
adapters out of the run's folder, which it must see under the same path. The variable VLLM_API_KEY
holds its key, if it has one.

A turn is one request: token ids in, token ids and their log-probabilities out. Nothing is decoded
and encoded again. All rows of a group ask one server, whose prefix cache then holds their prompt.

Answers come in any order, so that a run is not repeated bit for bit, and no seeds are sent: with a
seed vLLM samples each row by itself, and vLLM 0.32 for CPUs crashes when it splits such a prompt.
The client is http.client, which can continue to wait after a time-out.
"""
import json
import os
import shutil
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import closing, nullcontext, suppress
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from itertools import count
from urllib.parse import urlsplit

import torch

from core.config import UserError, first_line, say
from core.logprobs import token_logprobs
from core.model import save_model, settings
from extras.background import in_thread
from lora import reference

REQUESTS = 128  # of each server, at once, by all ranks together
TRIES = 8  # of a request; the pauses between them add up to half a minute
CONNECT = 5  # seconds, then the machine is off
PATIENCE = 30  # seconds without an answer, then the server is asked whether it lives
DEADLINE = 3600  # seconds that a silent server gets, and a busy one
KEPT = 2  # adapters that stay loaded: the newest, and the one that a step ahead plays
TOKENS = 64  # of the check
SHIFT = 0.03  # which the check adds to B
# Nats, the mean of |difference| over the check's tokens. bfloat16 in two programs differs by 0.03
# to 0.07; a base that has the adapter merged already, and so plays it twice, has differed by 0.2.
TOLERANCE = 0.1
GAP = 0.3  # nats, of a step's sampler_gap: what no rounding explains


class Lost(UserError):
    """No answer, half of one, or one without sense: the next try may have more luck."""


class Busy(Lost):
    """The server lives, and has too much to do."""


ERRORS = {408: Lost, 429: Busy}  # what these statuses raise


def ask(url: str, body=None, flag: str = "--sampler") -> bytes:
    """Return the answer to a POST of `body`, or to a GET without one. `flag` opens the errors.

    Raises UserError for an answer that the same request would get again, and else Lost.
    """
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    key = os.environ.get("VLLM_API_KEY", "none")
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    data = body and json.dumps(body)
    try:
        with closing(kind(parts.netloc, timeout=CONNECT)) as connection:
            connection.connect()
            connection.sock.settimeout(PATIENCE)
            connection.request("POST" if body else "GET", parts.path, data, headers)
            if body:
                response = await_response(connection, url, flag)
            else:
                response = connection.getresponse()
            text = response.read()
    except (OSError, HTTPException) as error:
        raise Lost(f"{flag} {url}: {type(error).__name__}: {first_line(error)}") from None
    if response.status == 200:
        return text
    reason = first_line(text.decode(errors="replace") or response.reason)
    other = Lost if response.status >= 500 else UserError
    raise ERRORS.get(response.status, other)(f"{flag} {url}: {response.status}: {reason}")


def await_response(connection, url: str, flag: str):
    """Return the response. A silent server gets an hour, as long as its /health answers."""
    for _ in range(DEADLINE // PATIENCE):
        with suppress(TimeoutError):
            return connection.getresponse()
        ask(url.partition("/v1/")[0] + "/health", flag=flag)
    raise Lost(f"{flag} {url}: no answer in {DEADLINE} s")


def persist(tries: int, act, *arguments):
    """Return act(*arguments), tried so many times, with pauses, while it raises Lost.

    The last try begins within an hour. A busy server is asked until then.
    """
    end = time.monotonic() + DEADLINE
    for attempt in count(1):
        try:
            return act(*arguments)
        except Lost as error:
            if time.monotonic() > end or attempt >= tries and not isinstance(error, Busy):
                raise
        time.sleep(min(2 ** attempt / 8, PATIENCE))


class Servers:
    """The servers of a run, and the adapter that they play. Called, it returns an engine.

    Attributes:
        urls: of all servers; `living` are those that answered when they were last asked.
        name: of the adapter that is played. It is new each step: vLLM keeps the keys and values of
            a prompt under the adapter's name, and under an old name would use stale ones.
        prefix: of all names of the run.
        is_checked: True once `check_servers` has compared log-probabilities.
    """

    is_checked = False
    name = None

    def __init__(self, addresses: str, run):
        """Ask every server for its context. Raises UserError for a bad address or no answer."""
        self.run = run
        urls = [url.strip().rstrip("/").removesuffix("/v1") for url in addresses.split(",")]
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise UserError(f"--sampler {addresses}: {url!r} does not begin with http:// or "
                                "https://")
        self.urls = self.living = list(dict.fromkeys(urls))
        self.folder = run.folder / "sampler"
        # A server may know the names of an earlier run, and so they begin with a prefix.
        self.context, self.prefix = run.ranks.first(
            lambda: (min(map(context_of, self.urls)), f"{time.time_ns():x}"))
        run.listeners.append(check_gap)
        if run.writes:
            run.endings.append(lambda folder: self.retire())

    def __call__(self, model, *, tokens, slots, **sampling):
        """Return an engine that plays the adapter which was loaded last."""
        if tokens > self.context:
            raise UserError(f"--max_tokens {tokens}: the server's context has {self.context}; "
                            f"start it with --max-model-len {tokens}, or give fewer")
        return ServerEngine(self, model, **sampling)

    # --------------------------------------------------------------------------------- the adapter
    def load_policy(self, model):
        """Let all servers load the model's adapter, once a step, by rank 0.

        Returns the context in which it is played.
        """
        if not settings(model):
            raise UserError("--sampler: servers are told a new adapter each step; all weights are "
                            "a thousand times as many bytes, so train an adapter: --lora_r 16")
        self.vocabulary = model.config.get_text_config().vocab_size
        name = f"{self.prefix}-step-{self.run.step:06d}"
        if name != self.name:
            self.name = name
            self.living = self.run.ranks.first(lambda: self.publish(model, name))
        return nullcontext()

    def publish(self, model, name: str) -> list:
        """Write the model's adapter, let the servers load it, and unload old ones.

        Returns the servers that live. It is an error if there are none, or one refuses.
        """
        save_model(model, self.folder / name)
        futures = self.everywhere(self.urls, self.tell, "load", name)
        errors = [future.exception() for future in futures.values()]
        self.living = [url for url, error in zip(futures, errors) if not error]
        for error in filter(None, errors):
            if not self.living or not isinstance(error, Lost):
                raise UserError(
                    f"{error}; start it where it sees {self.folder / name}, with "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-lora and --max-lora-rank")
            say(f"{error}; the other servers take its episodes")
        self.retire(KEPT)
        return self.living

    def retire(self, kept: int = 0):
        """Let the servers that live unload all adapters but the newest, and remove their folders.

        They may also have what the run left that was stopped before.
        """
        names = sorted(path.name for path in self.folder.glob("*"))
        names.sort(key=lambda name: name.startswith(self.prefix))
        for name in names[:len(names) - kept]:
            self.everywhere(self.living, self.tell, "unload", name)
            # On a network drive a file that is in use cannot be removed.
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def tell(self, url: str, verb: str, name: str):
        """Let a server load or unload an adapter, unless it has done so already."""
        body = {"lora_name": name, "lora_path": str(self.folder / name)}
        try:
            ask(f"{url}/v1/{verb}_lora_adapter", body)
        except UserError as error:
            if "already" not in str(error):
                raise

    def everywhere(self, urls: list, act, *arguments) -> dict:
        """Call act(url, *arguments) for these servers. Returns {url: its Future, which is done}.

        A server that was gone is asked once. Signals are looked at.
        """
        futures = {}
        for url in urls:
            tries = TRIES if url in self.living else 1
            futures[url] = in_thread(persist, tries, act, url, *arguments)
        while wait(futures.values(), 0.1).not_done:
            self.run.check()
        return futures

    # ------------------------------------------------------------------------------------ requests
    def complete(self, body: dict, number: int):
        """Return the ids and logprobs of one turn, by the server of this number if it lives."""
        living = self.living
        url = living[number % len(living)]
        try:
            return self.turn(url, body)
        except Lost as error:
            # The others take its rows until the next adapter. If there are none, all are asked.
            if not isinstance(error, Busy):
                self.living = [other for other in living if other != url] or self.urls
            raise
        except UserError:
            # It may have been started again, and then lacks the adapter.
            self.tell(url, "load", body["model"])
            return self.turn(url, body)

    def turn(self, url: str, body: dict):
        """Ask a server for one turn. Returns its ids and logprobs."""
        text = ask(f"{url}/v1/completions", body)
        limit, stop_ids = body["max_tokens"], set(body["stop_token_ids"])
        with suppress(LookupError, TypeError, ValueError, RecursionError):
            choice = json.loads(text)["choices"][0]
            ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            if (len(ids) == len(logprobs) <= limit
                    and 0 <= min(ids) and max(ids) < self.vocabulary
                    and all(-9999 < logprob < 1e-3 for logprob in logprobs)
                    and stop_ids.isdisjoint(ids[:-1])
                    and (ids[-1] in stop_ids or len(ids) == limit)):
                return ids, logprobs
        raise Lost(f"--sampler {url}: the answer is no turn, which has token ids with their "
                   "log-probabilities, and ends with its first stop id or with max_tokens")


# One for all rollouts and evaluations of a run.
servers_of = cache(Servers)


def context_of(url: str) -> int:
    """Return how many tokens an episode may have at this server, or raise UserError."""
    try:
        models = json.loads(ask(f"{url}/v1/models"))["data"]
        return int(next(model["max_model_len"] for model in models if not model.get("parent")))
    except Exception as error:
        raise UserError(
            f"--sampler {url}: no vLLM server answers there ({first_line(error)})") from None


def check_gap(step: int, metrics: dict, timing: dict):
    """Raise UserError if a step's log-probabilities are too far from ours; episodes may be old."""
    gap = metrics.get("sampler_gap", 0.0)
    if not gap <= GAP and not metrics.get("staleness"):
        raise UserError(f"--sampler: sampler_gap {gap:.2g} of step {step} is above {GAP} nats: the "
                        "servers do not play the policy any more")


@torch.no_grad()
def check_servers(servers: Servers, model, body: dict):
    """Raise UserError unless all servers play the model's policy: they continue body["prompt"].

    They play it with SHIFT added to B, before the first episode. So an adapter that a server leaves
    out is found before it has learned anything.
    """
    body["model"] = f"{servers.prefix}-check"
    shifted = {name: p + SHIFT for name, p in model.named_parameters() if name.endswith(".lora.B")}
    with reference(model.eval(), shifted):
        servers.publish(model, body["model"])
        for url in servers.urls:
            ids, theirs = persist(TRIES, servers.turn, url, body)
            token_ids = torch.tensor([body["prompt"] + ids], device=model.device)  # (1, T)
            mask = torch.ones_like(token_ids)
            ours, _ = token_logprobs(model, token_ids, mask, body["temperature"])
            gap = (ours[0, -len(ids):].cpu() - torch.tensor(theirs)).abs().mean()
            result = f"sampler {url}: its log-probabilities differ by {gap:.2g} nats from ours"
            if not gap < TOLERANCE:
                raise UserError(f"--{result}, where bfloat16 explains 0.07: it plays another model "
                                "than --model_path, or leaves the adapter out, or tells raw ones "
                                "(start it with --logprobs-mode processed_logprobs)")
            say(result)
    servers.retire(kept=1)


class ServerEngine:
    """An engine (the protocol is in core/engine.py) whose turns are requests to the servers.

    All ids of a row stay in `row.pending`: each request has them all.
    """

    def __init__(self, servers: Servers, model, *, stop_ids, temperature, top_k=0, top_p=1.0):
        self.servers, self.model = servers, model
        self.body = {
            "model": servers.name, "stop_token_ids": sorted(stop_ids), "logprobs": 0,
            "return_token_ids": True, "temperature": temperature, "top_p": top_p,
            "top_k": top_k or -1, "min_p": 0, "repetition_penalty": 1}
        self.asked = {}  # the Future of a turn -> its row
        self.queue = deque()  # rows that are asked for when others have been answered

    @property
    def busy(self) -> bool:
        return bool(self.asked)

    @property
    def clock(self) -> int:
        """Steps of 10 ms: no row waits for another."""
        return int(time.monotonic() * 100)

    def add(self, rows):
        if self.servers.run.writes and not self.servers.is_checked:
            check_servers(self.servers, self.model, {
                **self.body, "prompt": rows[0].pending, "max_tokens": min(TOKENS, rows[0].limit),
                "stop_token_ids": [], "ignore_eos": True})
        self.servers.is_checked = True
        self.ask(rows)

    def extend(self, row, ids, limit):
        row.pending = row.pending + ids
        row.limit = limit
        self.ask([row])

    def release(self, row):
        pass

    def ask(self, rows=()):
        """Ask for turns, each in a thread. The ranks share what the servers take."""
        self.queue.extend(rows)
        ranks = self.servers.run.ranks
        places = REQUESTS * len(self.servers.living) / ranks.world
        while self.queue and len(self.asked) < places:
            row = self.queue.popleft()
            body = {**self.body, "prompt": row.pending, "max_tokens": row.limit}
            # A rollout counts its groups. Ranks begin with different servers.
            future = in_thread(persist, TRIES, self.servers.complete, body, ranks.rank + row.group)
            self.asked[future] = row

    def step(self):
        """Return the rows whose turn has ended, perhaps none: signals are looked at in between."""
        rows = []
        for future in wait(self.asked, 0.1, FIRST_COMPLETED).done:
            row = self.asked.pop(future)
            row.turn, row.logprobs = future.result()
            row.pending = row.pending + row.turn
            rows.append(row)
        self.ask()
        return rows
