"""Episodes that vLLM servers sample: `--sampler http://host:8000[,http://other:8000]`.

A server is vLLM's own, started with the run's base model, or `python agent.py --serve`. It reads
adapters out of the run's folder, which it must see under the same path.

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora --max-lora-rank 16 \
        --max-loras 3 --logprobs-mode processed_logprobs --generation-config vllm

`Servers` makes the engines of a run, which have the protocol that llm/engine.py states. A turn is
one request: token ids in, token ids and their log-probabilities out. Nothing is decoded and encoded
again. All rows of a group ask one server, whose prefix cache then holds their prompt.

The adapter of each step has a name of its own. vLLM keeps the keys and values of a prompt under the
adapter's name, and under an old name would use stale ones. Before the first episode
llm/vllm_proof.py compares the servers' log-probabilities with ours.

Answers come in any order, so that a run is not repeated bit for bit, and no seeds are sent: with a
seed vLLM samples each row by itself, and vLLM 0.32 for CPUs crashes when it splits such a prompt.

The client is http.client: a turn has no use for more, and after a time-out it can go on waiting. A
server started with VLLM_API_KEY, or ours with --token, gets the key from the variable of that name.
"""
import json
import os
import secrets
import shutil
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import closing, nullcontext
from functools import cache, partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

from experiment.background import in_thread
from experiment.bars import say
from experiment.errors import UserError, first_line
from llm.adapter_files import save_model
from llm.vllm_proof import prove
from lora import settings

REQUESTS = 128  # of each server, at once
TRIES = 8  # of a request; the pauses between them add up to half a minute
PATIENCE = 30  # seconds without an answer, then the server is asked whether it lives
WAITS = 120  # so many times
KEPT = 2  # adapters that stay loaded: the newest, and the one that a step ahead plays


class Refused(Exception):
    """An answer that the same request would get again."""


class Lost(Exception):
    """No answer, half of one, or one without sense: the next try may have more luck."""


class NotFound(Refused):
    """The server does not know the adapter. It may have been started again."""


def ask(url: str, body=None) -> bytes:
    """Return the answer to a POST of `body`, or to a GET without one. Raises Refused or Lost."""
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    key = os.environ.get("VLLM_API_KEY", "none")
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        with closing(kind(parts.netloc, timeout=PATIENCE)) as connection:
            method = "POST" if body else "GET"
            connection.request(method, parts.path, body and json.dumps(body), headers)
            response = await_response(connection, url)
            text = response.read()
    except (OSError, HTTPException) as error:
        raise Lost(f"{type(error).__name__}: {first_line(error)}") from None
    if response.status == 200:
        return text
    error = Refused
    if response.status == 404:
        error = NotFound
    # The first two say that it has too much to do.
    elif response.status in (408, 429) or response.status >= 500:
        error = Lost
    reason = text.decode("utf-8", "replace") or response.reason
    raise error(f"{response.status}: {first_line(reason)}")


def await_response(connection, url: str):
    """Return the response, for which a silent server gets an hour as long as its /health answers.

    Raises Lost, TimeoutError or what http.client raises.
    """
    for _ in range(WAITS):
        try:
            return connection.getresponse()
        except TimeoutError:
            if url.endswith("/health"):
                raise
            ask(url.partition("/v1/")[0] + "/health")
    raise Lost(f"no answer in {WAITS * PATIENCE} s")


def persist(act, tries: int):
    """Return act(), called again after a pause where it raises Lost, so many times in all."""
    for attempt in range(tries - 1):
        try:
            return act()
        except Lost:
            time.sleep(2 ** attempt / 4)
    return act()


class Servers:
    """The servers of a run, and the adapter that they play. Called, it returns an engine.

    Attributes:
        urls: of all servers; `living` are those that answered when they were last asked.
        name: of the adapter that is played.
        names: of all adapters that are loaded, the newest last.
    """

    def __init__(self, addresses: str, run):
        """Ask every server what it plays. Raises UserError if one does not answer."""
        self.run = run
        urls = [url.strip().rstrip("/").removesuffix("/v1") for url in addresses.split(",")]
        self.urls = self.living = list(dict.fromkeys(urls))
        self.folder = run.folder / "sampler"
        # A server may know the names of an earlier run, and so they begin with a prefix.
        self.context, self.prefix = run.ranks.first(
            lambda: (min(map(context_of, self.urls)), secrets.token_hex(4)))
        self.step = self.name = None
        self.names = []
        self.is_proved = False

    def __call__(self, model, *, tokens, slots, **sampling):
        """Return an engine that plays the adapter which was loaded last."""
        if tokens > self.context:
            raise UserError(f"--max_tokens {tokens}: the server's context has {self.context}; "
                            f"start it with --max-model-len {tokens}, or give fewer")
        return ServerEngine(self, model, **sampling)

    # --------------------------------------------------------------------------------- the adapter
    def policy(self, model):
        """Let all servers load the model's adapter. Returns the context in which it is played.

        All ranks call it, and rank 0 tells the servers. Weights change once a step, and so does the
        name.
        """
        if not settings(model):
            raise UserError("--sampler: servers are told a new adapter each step; all weights are "
                            "a thousand times as many bytes, so train an adapter: --lora_r 16")
        self.vocabulary = model.config.get_text_config().vocab_size
        if self.step != self.run.step:
            self.step = self.run.step
            self.name = f"{self.prefix}-step-{self.step:06d}"
            self.living = self.run.ranks.first(lambda: self.publish(model, self.name))
        return nullcontext()

    def publish(self, model, name: str) -> list:
        """Write the model's adapter, let the servers load it, and unload old ones.

        Returns the servers that live. Raises UserError if there are none, or one refuses.
        """
        if not self.names:
            # What a run left here that was killed.
            shutil.rmtree(self.folder, ignore_errors=True)
        save_model(model, self.folder / name)
        self.names.append(name)
        errors = self.everywhere(self.load, name)
        self.living = [url for url, error in errors.items() if error is None]
        for url, error in errors.items():
            message = f"--sampler {url}: {error}"
            if isinstance(error, Refused) or not self.living:
                raise UserError(message)
            if error:
                say(f"{message}; the other servers take its episodes")
        for old in self.names[:-KEPT]:
            self.retire(old)
        return self.living

    def retire(self, name: str):
        """Let the servers unload an adapter, and remove its folder."""
        self.everywhere(self.tell, "unload", name)
        shutil.rmtree(self.folder / name)
        self.names.remove(name)

    def load(self, url: str, name: str):
        """Let a server load an adapter. Raises Lost, or Refused which says how to start it."""
        try:
            self.tell(url, "load", name)
        except Refused as error:
            if "already" not in str(error):
                raise Refused(
                    f"does not load {self.folder / name} ({error}); start it where it sees this "
                    "folder, with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-lora and "
                    "--max-lora-rank") from None

    def tell(self, url: str, verb: str, name: str):
        """Send one of the two requests about adapters."""
        body = {"lora_name": name, "lora_path": str(self.folder / name)}
        ask(f"{url}/v1/{verb}_lora_adapter", body)

    def everywhere(self, act, *arguments) -> dict:
        """Return {url: what act(url, *arguments) returns or at last raises}.

        A server that was gone is asked once. Signals are looked at.
        """
        futures = {}
        for url in self.urls:
            tries = TRIES if url in self.living else 1
            futures[url] = in_thread(persist, partial(act, url, *arguments), tries)
        while wait(futures.values(), 0.1).not_done:
            self.run.check()
        return {url: future.exception() or future.result() for url, future in futures.items()}

    # ------------------------------------------------------------------------------------ requests
    def complete(self, body: dict, number: int):
        """Return the ids and logprobs of one turn, by the server of this number or by another."""
        try:
            return persist(partial(self.complete_once, body, number), TRIES)
        except (Lost, Refused) as error:
            urls = ",".join(self.urls)
            raise UserError(f"--sampler {urls}: no usable answer ({error})") from None

    def complete_once(self, body, number):
        living = self.living
        url = living[number % len(living)]
        try:
            return self.turn(url, body)
        except NotFound:
            self.load(url, body["model"])
            return self.turn(url, body)
        except Lost:
            # The others take its rows until the next adapter. If there are none, all are asked.
            self.living = [other for other in living if other != url] or self.urls
            raise

    def turn(self, url: str, body: dict):
        """Ask a server for one turn. Returns its ids and logprobs. Raises Refused or Lost."""
        text = ask(f"{url}/v1/completions", body)
        try:
            choice = json.loads(text)["choices"][0]
            ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            is_sound = 0 < len(ids) == len(logprobs) <= body["max_tokens"] and all(
                type(i) is int and 0 <= i < self.vocabulary and -9999 < logprob < 1e-3
                for i, logprob in zip(ids, logprobs))
        except (LookupError, TypeError, ValueError, RecursionError):
            is_sound = False
        if not is_sound:
            raise Lost("the answer holds no token ids with their log-probabilities")
        stops = [i for i in ids if i in body["stop_token_ids"]]
        if stops != ids[-1:] and (stops or len(ids) < body["max_tokens"]):
            raise Lost(f"the turn ends with token {ids[-1]}, and not with its first stop token")
        return ids, logprobs


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


class ServerEngine:
    """An engine (the protocol is in llm/engine.py) whose turns are requests to the servers.

    All ids of a row stay in `row.pending`: each request has them all.
    """

    def __init__(self, servers: Servers, model, *, stop_ids, temperature, top_k=0, top_p=1.0):
        self.servers, self.model = servers, model
        self.body = {
            "model": servers.name, "stop_token_ids": sorted(stop_ids), "logprobs": 0,
            "return_token_ids": True, "temperature": temperature, "top_p": top_p,
            "top_k": top_k or -1, "min_p": 0, "repetition_penalty": 1}
        self.numbers = {}  # group -> the number of its server
        self.asked = {}  # the Future of a turn -> its row
        self.queue = deque()  # rows that are asked for when others have been answered

    @property
    def busy(self) -> bool:
        return bool(self.asked)

    @property
    def clock(self) -> int:
        """Steps of 10 ms: here no row waits for another, and results are due when they are."""
        return int(time.monotonic() * 100)

    def add(self, rows):
        rank = self.servers.run.ranks.rank
        if not self.servers.is_proved and rank == 0:
            prompts = list({row.group: row.pending for row in rows}.values())
            prove(self.servers, self.model, prompts, self.body)
        self.servers.is_proved = True
        for row in rows:
            # Ranks begin with different servers.
            self.numbers.setdefault(row.group, rank + len(self.numbers))
            self.queue.append(row)
        self.ask_more()

    def extend(self, row, ids, limit):
        row.pending = row.pending + ids
        row.limit = limit
        self.queue.append(row)
        self.ask_more()

    def release(self, row):
        pass

    def ask_more(self):
        """Ask for the next turns, each in a thread, as many as the servers take."""
        while self.queue and len(self.asked) < REQUESTS * len(self.servers.urls):
            row = self.queue.popleft()
            body = {**self.body, "prompt": row.pending, "max_tokens": row.limit}
            turn = in_thread(self.servers.complete, body, self.numbers[row.group])
            self.asked[turn] = row

    def step(self):
        """Return the rows whose turn has ended, perhaps none: signals are looked at in between."""
        rows = []
        for turn in wait(self.asked, 0.1, FIRST_COMPLETED).done:
            row = self.asked.pop(turn)
            row.turn, row.logprobs = turn.result()
            row.pending = row.pending + row.turn
            rows.append(row)
        self.ask_more()
        return rows
