"""Asking the server of a judge: many requests at once, repeated, counted, and kept on disk.

    a time-out, no connection, 408, 409, 425, 429, 5xx    asked again after a pause, which doubles;
                                                          a Retry-After of the server is obeyed
    an answer without readable scores                     asked again, with a line that says why
    still none after `tries`, or any other status         UserError: the run ends. What was judged
                                                          until then is on disk

A verdict is a line of judge.jsonl in the output folder, with the prompt's hash, the scores, what
the judge wrote, and what it cost. The same prompt has the same verdict: within a step, in a later
one, and in a resumed run, which asks for nothing twice.
"""
import hashlib
import json
import os
import queue
import threading
import time
from collections import Counter
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from core.config import UserError, first_line, say
from core.data import to_json
from extras.background import in_thread

PAUSE = 1.0  # seconds before the second try, twice as long before the third
LONGEST = 60.0  # seconds of a pause
LATER = (408, 409, 425, 429)  # statuses that may be another one the next time
SPENT = ("requests", "tokens_in", "tokens_out")  # of a verdict, in its line
PARAMETERS = ("temperature", "max_tokens")  # of Settings, sent if they are stated


class Again(Exception):
    """The next try may have more luck. `pause` is what the server asks for, in seconds."""

    pause = 0.0


class Unreadable(Again):
    """An answer without readable scores."""


class Server:
    """The server of a judge, and the verdicts that it has given.

    Attributes:
        url: the address, without a slash at its end.
        costs: what this process has used: verdicts, those of them that were known ("cached"),
            requests, tokens in and out, and seconds of waiting.
    """

    def __init__(self, name: str, settings, run=None):
        self.name, self.settings, self.run = name, settings, run
        self.url = address(name, settings.url or os.environ.get("OPENAI_BASE_URL", ""))
        self.folder = run and run.folder
        self.costs = Counter()
        self.lock = threading.Lock()
        self.known = None  # {hash of a request: scores}, once it has been read
        self.model = settings.model

    # ------------------------------------------------------------------------------ many questions
    def ask(self, questions: list[tuple[str, int]]) -> list[list[float]]:
        """Return the scores of each prompt, which asks for so many. Raises UserError."""
        began, before = time.monotonic(), Counter(self.costs)
        self.read()
        if self.model is None and questions:
            self.model = self.only_model()
        keys = [self.key(prompt) for prompt, _ in questions]
        jobs = queue.SimpleQueue()
        new = {key: question for key, question in zip(keys, questions) if key not in self.known}
        for job in new.items():
            jobs.put(job)
        stopped = threading.Event()
        threads = [in_thread(self.work, jobs, stopped)
                   for _ in range(min(len(new), self.settings.at_once))]
        try:
            # In short waits, so that a signal ends them.
            while (state := wait(threads, 0.1, FIRST_EXCEPTION)).not_done:
                if any(thread.exception() for thread in state.done):
                    break
                if self.run:
                    self.run.check()
        finally:
            stopped.set()
        for thread in threads:
            if thread.done():
                thread.result()
        self.costs.update(verdicts=len(keys), cached=len(keys) - len(new))
        self.costs["seconds"] += time.monotonic() - began
        if keys:
            self.tell(self.costs - before)
        return [self.known[key] for key in keys]

    def work(self, jobs, stopped):
        """Ask for one verdict after the other, until there is none left or another failed."""
        with suppress(queue.Empty):
            while not stopped.is_set():
                key, (prompt, n) = jobs.get_nowait()
                self.judge(key, prompt, n, stopped)

    def judge(self, key: str, prompt: str, n: int, stopped):
        """Ask for a verdict until it can be read, and keep it."""
        began, spent = time.monotonic(), Counter()
        text, why = prompt, None
        for attempt in range(self.settings.tries):
            if why is not None and stopped.wait(pause):
                return
            pause = min(PAUSE * 2 ** attempt, LONGEST)
            try:
                answer = self.complete(text, spent)
                scores = scores_in(answer, n)
                break
            except Again as error:
                why, pause = error, max(pause, min(error.pause, LONGEST))
                if isinstance(error, Unreadable):
                    text = f"{prompt}\n\nAn earlier answer could not be read: {error}."
                    pause = 0.0
        else:
            raise UserError(f"--rewards {self.name}: no verdict of {self.url} in "
                            f"{self.settings.tries} tries; the last: {why}")
        spent["seconds"] = time.monotonic() - began
        line = {"judge": self.name, "key": key, "scores": scores, "answer": answer, **spent}
        with self.lock:
            self.known[key] = scores
            if self.folder:
                with open(self.path, "a", encoding="utf-8", newline="\n") as file:
                    file.write(to_json(line))

    def tell(self, costs: Counter):
        """Print what a rollout's verdicts have cost."""
        if not self.run or self.run.writes:
            say(f"{self.name}: {costs['verdicts']} verdicts, {costs['cached']} of them known; "
                f"{costs['requests']} requests, {costs['tokens_in']} tokens in, "
                f"{costs['tokens_out']} out, {costs['seconds']:.1f} s")
        self.add(costs)

    def add(self, costs: dict):
        """Add to the sums of the run."""
        if self.run:
            self.run.costs.update({f"judge/{name}": value for name, value in costs.items()})

    # ------------------------------------------------------------------------------- the verdicts
    @property
    def path(self) -> Path:
        """The file of the verdicts that this process adds. Each of several ranks has its own."""
        rank = self.run.ranks.rank
        return self.folder / (f"judge-{rank}.jsonl" if rank else "judge.jsonl")

    def read(self):
        """Read the verdicts that are on disk, once in a run, and count what they have cost."""
        if self.known is not None:
            return
        kept = self.run.kept if self.run else {}
        name = f"verdicts of {self.name}"
        if name in kept:  # an earlier server of this run has read them
            self.known = kept[name]
            return
        self.known = kept[name] = {}
        for path in sorted(self.folder.glob("judge*.jsonl")) if self.folder else ():
            for text in path.read_text("utf-8").splitlines():
                # A run that was killed may have left half a line.
                with suppress(ValueError, TypeError, KeyError):
                    line = json.loads(text)
                    self.known[line["key"]] = line["scores"]
                    if line["judge"] == self.name and path == self.path:
                        spent = {name: line[name] for name in SPENT}
                        self.add({"verdicts": 1, **spent})
            if path == self.path and not path.read_bytes().endswith(b"\n"):
                with open(path, "a", encoding="utf-8") as file:
                    file.write("\n")

    def key(self, prompt: str) -> str:
        """Return the hash by which a verdict is known: of all that decides it."""
        return hashlib.sha256(json.dumps(self.body(prompt)).encode()).hexdigest()[:32]

    # -------------------------------------------------------------------------------- one request
    def body(self, text: str) -> dict:
        """Return the body of a request."""
        stated = {name: getattr(self.settings, name) for name in PARAMETERS}
        return {"model": self.model, "messages": [{"role": "user", "content": text}],
                **{name: value for name, value in stated.items() if value is not None}}

    def only_model(self) -> str:
        """Return the name of the server's model. UserError if it has several."""
        try:
            names = [model["id"] for model in self.request("/models")["data"]]
        except (Again, LookupError, TypeError) as error:
            raise UserError(f"--rewards {self.name}: {first_line(error)}") from None
        if len(names) != 1:
            raise UserError(f"--rewards {self.name}: {self.url} has {len(names)} models; write "
                            f"`model: NAME` into the rubric file: {', '.join(names)[:200]}")
        return names[0]

    def complete(self, text: str, spent: Counter) -> str:
        """Return the judge's answer, and count what it took. Raises Again or UserError."""
        spent["requests"] += 1
        answer = self.request("/chat/completions", self.body(text))
        try:
            choice = answer["choices"][0]
            content = choice["message"]["content"] or ""
            usage = answer.get("usage") or {}
            tokens = {"tokens_in": int(usage.get("prompt_tokens") or 0),
                      "tokens_out": int(usage.get("completion_tokens") or 0)}
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise Again(f"{self.url}: the answer is none of OpenAI's API ({error!r})") from None
        spent.update(tokens)
        with self.lock:
            self.costs.update(tokens)
        if choice.get("finish_reason") == "length":
            raise Unreadable("it was cut by the limit of tokens")
        return str(content)

    def request(self, path: str, body=None):
        """Return the parsed answer to a POST of the body, or to a GET without one."""
        key = os.environ.get("OPENAI_API_KEY", "none")
        # Some services refuse the name that urllib gives itself.
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}",
                   "User-Agent": "agentic-rl"}
        request = Request(self.url + path, body and json.dumps(body).encode(), headers)
        with self.lock:
            self.costs["requests"] += 1
        try:
            with urlopen(request, timeout=self.settings.timeout) as response:
                return json.load(response)
        except HTTPError as error:
            raise self.refused(error) from None
        # A time-out is an OSError. What is no JSON, or no text, is a ValueError.
        except (OSError, HTTPException, ValueError, RecursionError) as error:
            # What urlopen met is the reason of its own exception.
            cause = getattr(error, "reason", error)
            raise Again(f"{self.url}: {type(cause).__name__}: {first_line(cause)}") from None

    def refused(self, error: HTTPError) -> Exception:
        """Return what to raise for a status of the server."""
        said = b""
        with suppress(OSError, HTTPException):
            said = error.read()
        reason = first_line(said.decode(errors="replace") or error.reason)
        text = f"{self.url}: {error.code}: {reason}"
        if error.code not in LATER and error.code < 500:
            return UserError(f"--rewards {self.name}: {text}")
        again = Again(text)
        with suppress(TypeError, ValueError):
            again.pause = float(error.headers.get("Retry-After"))
        return again


def address(name: str, url: str) -> str:
    """Return the address without a slash at its end. Raises UserError if it is none."""
    if not url.startswith(("http://", "https://")):
        raise UserError(f"--rewards {name}: set OPENAI_BASE_URL to the judge's address, such as "
                        "http://127.0.0.1:8000/v1, or write `url: ...` into the rubric file; it is "
                        f"{url!r}")
    return url.rstrip("/")


def scores_in(answer: str, n: int) -> list[float]:
    """Return the n scores in the last JSON object of an answer that has some, or raise Unreadable.

    Nothing else is raised, whatever the judge wrote.
    """
    place = len(answer)
    while (place := answer.rfind("{", 0, place)) >= 0:
        with suppress(ValueError, RecursionError):
            found, _ = json.JSONDecoder().raw_decode(answer, place)
            if "scores" in found:
                return checked(found["scores"], n)
    raise Unreadable('it has no JSON object {"scores": [...]}')


def checked(scores, n: int) -> list[float]:
    """Return the scores as floats, or raise Unreadable."""
    if not isinstance(scores, list) or len(scores) != n:
        raise Unreadable(f"there must be {n} scores in a list")
    # True is an int for Python. nan is not above 0.
    if not all(type(score) in (int, float) and 0 <= score <= 1 for score in scores):
        raise Unreadable("a score is a number from 0 to 1")
    return list(map(float, scores))
