"""Episodes that vLLM servers sample: `--sampler http://host:8000[,http://other:8000]`.

A server is vLLM's own, started with the run's base model. It must see the run's folder.

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora --max-lora-rank 16 \
        --max-loras 3 --logprobs-mode processed_logprobs --generation-config vllm

`Servers` makes the engines of a run, which have the protocol that llm/engine.py states. A turn is
one request: token ids in, token ids and their log-probabilities out; nothing is decoded and encoded
again. All rows of a group ask one server, whose prefix cache then holds their prompt.

Every new adapter gets a name of its own: vLLM keeps the keys and values of a prompt under the
adapter's name, and under an old name would play stale ones. Before the first episode
llm/vllm_proof.py compares the servers' log-probabilities with ours. Answers come in any order, so
that a run is not repeated bit for bit.
"""
import json
import math
import queue
import secrets
import shutil
import threading
import time
import urllib.error
import urllib.request
from hashlib import blake2b
from http.client import HTTPException

from experiment.errors import UserError, first_line
from llm.adapter_files import save_model
from llm.vllm_proof import prove
from lora import adapter_tensors, settings

REQUESTS = 128  # at once
TRIES = 4  # of a request, each at the next server
SECONDS = 300  # until an answer
KEPT = 2  # adapters that a server has loaded: the newest, and the one played by a step ahead
LOST = OSError, HTTPException, ValueError  # no answer, half of one, or no sense in it


class Refused(Exception):
    """An answer with the status `code`, which the same request would get again."""

    def __init__(self, code: int, message: str):
        super().__init__(f"{code}: {message}")
        self.code = code


def ask(url: str, body=None):
    """Return the parsed answer to a POST of `body`, or to a GET without one.

    Raises Refused for a status of 400 to 499, and one of LOST if there is no usable answer.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:
        reason = first_line(error.read().decode("utf-8", "replace"))
        if error.code < 500:
            raise Refused(error.code, reason) from None
        raise OSError(f"{error.code}: {reason}") from None
    # Loading an adapter is answered with a sentence.
    return json.loads(text) if text.startswith(b"{") else text


class Servers:
    """The servers of a run, and the adapter that they play. Called, it returns an engine.

    Attributes:
        name: of the newest adapter.
        is_remote: tells `rollout` that the model in this process takes no part.
    """

    is_remote = True

    def __init__(self, addresses: str, run):
        """Ask every server what it plays. Raises UserError if one does not answer."""
        self.urls = [url.strip().rstrip("/") for url in addresses.split(",")]
        self.folder = run.folder / "sampler"
        self.ranks = run.ranks
        self.context = min(self.ranks.first(lambda: list(map(context_of, self.urls))))
        # A server may know the names of an earlier run.
        self.prefix = self.ranks.gather(secrets.token_hex(4))[0]
        self.version = -1
        self.digest = None  # of the weights in the newest adapter
        self.proved = False
        self.requests = queue.SimpleQueue()
        for _ in range(REQUESTS):
            threading.Thread(target=self.work, daemon=True).start()

    def __call__(self, model, *, tokens, **sampling):
        """Return an engine that plays the model's adapter as it is now. The servers get it first.

        In the thread of a step played ahead it is the adapter as it was (episodes/ahead.py).
        """
        if tokens > self.context:
            raise UserError(f"--max_tokens {tokens}: the server's context has {self.context}; "
                            f"start it with --max-model-len {tokens}, or give fewer")
        if threading.current_thread() is threading.main_thread():
            self.load(model)
        return ServerEngine(self, model, **sampling)

    # --------------------------------------------------------------------------------- the adapter
    @property
    def name(self) -> str:
        return f"{self.prefix}-{self.version}"

    def load(self, model):
        """Let all servers load the model's adapter under a new name, if it has changed."""
        if not settings(model):
            raise UserError("--sampler: servers are told a new adapter each step; all weights are a "
                            "thousand times as much, so use --lora_r 16")
        digest = blake2b()
        for tensor in adapter_tensors(model).values():
            digest.update(tensor.detach().cpu().numpy())
        if digest.digest() != self.digest:
            self.digest = digest.digest()
            self.version += 1
            self.ranks.first(lambda: self._publish(model))

    def _publish(self, model):
        save_model(model, self.folder / self.name)
        living = [url for url in self.urls if self.bring(url, self.name)]
        if not living:
            raise UserError(f"--sampler: none of {', '.join(self.urls)} answers")
        old = f"{self.prefix}-{self.version - KEPT}"
        if (self.folder / old).exists():
            for url in living:
                self.tell(url, "unload", old)
            shutil.rmtree(self.folder / old)

    def bring(self, url: str, name: str) -> bool:
        """Let a server load an adapter; return False if it is gone. UserError if it refuses."""
        for attempt in range(TRIES):
            try:
                self.tell(url, "load", name)
                return True
            except LOST:
                time.sleep(2 ** attempt / 4)
            except Refused as error:
                if "already" in str(error):
                    return True
                hint = "is --max-lora-rank too low, or can the server not see this folder?"
                if error.code == 404:
                    hint = "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora"
                raise UserError(f"--sampler {url}: does not load {self.folder / name} "
                                f"({error}); {hint}") from None
        return False

    def tell(self, url: str, verb: str, name: str):
        """Send one of the two requests about adapters."""
        body = {"lora_name": name, "lora_path": str(self.folder / name)}
        ask(f"{url}/v1/{verb}_lora_adapter", body)

    # ------------------------------------------------------------------------------------ requests
    def work(self):
        """Answer requests until the process ends. An error is an answer, too: who waits raises it.

        """
        while True:
            body, server, put = self.requests.get()
            try:
                put(self.complete(body, server))
            except BaseException as error:
                put(error)

    def complete(self, body: dict, server: int):
        """Return the ids and logprobs of one turn, by this server or, if it fails, by the next."""
        for attempt in range(TRIES):
            url = self.urls[(server + attempt) % len(self.urls)]
            try:
                return turn_in(ask(f"{url}/v1/completions", body), body)
            except Refused as error:
                wrong = error
                if error.code != 404:
                    break
                # The server was started again, and has forgotten its adapters.
                self.bring(url, body["model"])
            except LOST as error:
                wrong = error
                time.sleep(2 ** attempt / 4)
        raise UserError(f"--sampler {url}: no usable answer "
                        f"({type(wrong).__name__}: {first_line(wrong)})")


def context_of(url: str) -> int:
    """Return how many tokens an episode may have at this server, or raise UserError."""
    try:
        models = ask(f"{url}/v1/models")["data"]
        return next(model["max_model_len"] for model in models if not model.get("parent"))
    except Exception as error:
        raise UserError(
            f"--sampler {url}: no vLLM server answers there ({first_line(error)})") from None


def turn_in(answer: dict, body: dict):
    """Return the ids and logprobs in an answer. Raises ValueError if they are not one turn's."""
    try:
        choice = answer["choices"][0]
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    except (KeyError, IndexError, TypeError):
        raise ValueError("the answer holds no token ids and log-probabilities") from None
    if not 0 < len(ids) == len(logprobs) <= body["max_tokens"]:
        raise ValueError(f"{len(ids)} ids and {len(logprobs)} log-probabilities")
    if not all(type(i) is int for i in ids) or not all(map(math.isfinite, logprobs)):
        raise ValueError("ids or log-probabilities are no numbers")
    if len(ids) < body["max_tokens"] and ids[-1] not in body["stop_token_ids"]:
        raise ValueError(f"the turn ends with token {ids[-1]}, which ends no turn here")
    return ids, logprobs


class ServerEngine:
    """An engine (the protocol is in llm/engine.py) whose turns are requests to the servers."""

    def __init__(self, servers: Servers, model, *, stop_ids, temperature, top_k=0, top_p=1.0,
                 slots=0):
        self.servers, self.model = servers, model
        self.body = {
            "model": servers.name, "stop_token_ids": sorted(stop_ids), "logprobs": 0,
            "return_token_ids": True, "temperature": temperature, "top_p": top_p,
            "top_k": top_k or -1, "min_p": 0, "repetition_penalty": 1}
        self.ids = {}  # row -> all of its ids
        self.server = {}  # group -> the number of its server
        self.asked = 0  # requests without an answer
        self.answers = queue.SimpleQueue()  # (row, its turn or an error)

    @property
    def busy(self) -> bool:
        return self.asked > 0

    @property
    def clock(self) -> int:
        """Steps of 10 ms: here no row waits for another, and results are due when they are."""
        return int(time.monotonic() * 100)

    def add(self, rows):
        if not self.servers.proved:
            self.servers.proved = True
            prompts = list({row.group: row.pending for row in rows}.values())
            prove(self.servers, self.model, prompts, self.body)
            self.servers.load(self.model)
            self.body["model"] = self.servers.name
        for row in rows:
            self.ids[row] = list(row.pending)
            self.server.setdefault(row.group, len(self.server))
            self.start(row)

    def extend(self, row, ids, limit):
        self.ids[row] += ids
        row.limit = limit
        self.start(row)

    def release(self, row):
        del self.ids[row]

    def start(self, row):
        """Ask for the row's next turn. What is drawn follows from its ids and its seed."""
        ids = list(self.ids[row])
        seed = (row.seed + len(ids)) % 2**31
        body = {**self.body, "prompt": ids, "max_tokens": row.limit, "seed": seed}
        self.asked += 1
        put = self.answers.put
        self.servers.requests.put(
            (body, self.server[row.group], lambda turn: put((row, turn))))

    def step(self):
        """Return the rows whose turn has ended, perhaps none: signals are looked at in between."""
        rows = []
        while self.asked and not (rows and self.answers.empty()):
            try:
                row, turn = self.answers.get(timeout=0.1)
            except queue.Empty:
                break
            self.asked -= 1
            if isinstance(turn, BaseException):
                raise turn
            row.turn, row.logprobs = turn
            self.ids[row] += row.turn
            rows.append(row)
        return rows
