"""A teacher behind a server: distill.py --teacher http://host:8000.

    vllm serve MODEL            or: python agent.py --serve --model_path MODEL

Its log-probabilities of given tokens come by /v1/completions with `prompt_logprobs`: an episode is
one request, token ids in and a number for each of them out. That the server's tokenizer is the
student's is checked by the text that it tells of each token. The adapter of --model_path is not its
business. Servers tell prompt_logprobs at temperature 1, whatever temperature is asked for.
"""
import json
from concurrent.futures import wait
from contextlib import suppress

import torch

from core.config import UserError, first_line
from extras.background import in_thread
from extras.vllm.servers import TRIES, Lost, ask, persist

REQUESTS = 32  # at once, by all ranks together


class ServerTeacher:
    """What distill.py asks of a teacher, answered by a server.

    Attributes:
        name: of the model that the server was started with.
        texts_checked: True once the texts of an episode's tokens have been compared.
    """

    texts_checked = False

    def __init__(self, url: str, tokenizer, config):
        """Ask the server for its model. Raises UserError for no answer or a short context."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.tokenizer = tokenizer
        if config.temperature != 1:
            raise UserError("--teacher: servers tell log-probabilities at temperature 1; leave out "
                            f"--temperature {config.temperature:g}")
        try:
            models = json.loads(ask(f"{self.url}/v1/models", flag="--teacher"))["data"]
            model = next(model for model in models if not model.get("parent"))
            self.name, context = model["id"], int(model["max_model_len"])
        except Exception as error:
            raise UserError(f"--teacher {url}: no server answers there ({first_line(error)})"
                            ) from None
        # A request samples one token, which is not used.
        if config.max_tokens >= context:
            raise UserError(f"--max_tokens {config.max_tokens}: the teacher's context has {context}"
                            ", and needs one more than an episode: give --max_tokens "
                            f"{context - 1}")

    def logprobs(self, token_ids, mask, temperature, run):
        """Return the teacher's log-probabilities of the tokens where the mask is 1: (B, T)."""
        logprobs = torch.zeros(token_ids.shape)
        futures = {}
        for i in run.ranks.share(len(token_ids)):
            used = int(mask[i].nonzero().max()) + 1 if mask[i].any() else 0
            if used:
                futures[in_thread(persist, TRIES, self.score, token_ids[i, :used].tolist())] = i
            limit = max(1, REQUESTS // run.ranks.world)
            while sum(not future.done() for future in futures) >= limit:
                wait(futures, 0.02)
                run.check()
        while wait(futures, 0.1).not_done:
            run.check()
        for future, i in futures.items():
            row = torch.tensor(future.result())
            logprobs[i, :len(row)] = row
        return run.ranks.add(logprobs.to(mask.device) * mask)

    def score(self, ids: list) -> list:
        """Return the log-probabilities of the ids, 0.0 for the first. Raises Lost for nonsense."""
        body = {"model": self.name, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        text = ask(f"{self.url}/v1/completions", body, flag="--teacher")
        logprobs = texts = None
        with suppress(LookupError, TypeError, ValueError, RecursionError):
            answers = json.loads(text)["choices"][0]["prompt_logprobs"]
            tokens = [answer[str(token)] for token, answer in zip(ids[1:], answers[1:])]
            texts = [token.get("decoded_token") for token in tokens]
            logprobs = [float(token["logprob"]) for token in tokens]
            if len(answers) != len(ids) or not all(-9999 < x < 1e-3 for x in logprobs):
                logprobs = None
        if logprobs is None:
            raise Lost(f"--teacher {self.url}: the answer has no prompt_logprobs of the tokens")
        if not self.texts_checked:
            self.check_texts(ids[1:], texts)
        return [0.0, *logprobs]

    def check_texts(self, ids: list, texts: list):
        """Raise UserError if the server's tokens spell other texts than the student's."""
        for token_id, theirs in zip(ids, texts):
            ours = self.tokenizer.decode([token_id])
            # A token may be a part of a character, and servers write that in several ways.
            if theirs is None or "\ufffd" in ours + theirs:
                continue
            if ours.strip() != theirs.strip():
                raise UserError(f"--teacher {self.url}: its tokenizer is another one than the "
                                f"student's: token {token_id} is {theirs!r}, not {ours!r}")
        self.texts_checked = True

    def success(self, tokenizer, config, tasks, run):
        """Return None: what the teacher would solve is not asked."""
