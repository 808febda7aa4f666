"""One thread decodes for everybody who asks the server: their rows share one engine.

    player = Player(model)
    player.add(choice)          # in any thread; choice.done is a Future
    player.run()                # in the thread that alone touches the engine and the weights

Other threads put functions into its inbox, and they are called between two decode steps.
"""
import queue
import secrets
import time
from concurrent.futures import Future
from functools import partial

import torch

from core.engine import Engine, Row
from core.data import members
from core.logprobs import token_logprobs
from core.model import read_settings
from extras.serve.calls import closing_of, whole_calls
from lora import adapt, adapted_linears, merged

SLOTS = 64  # rows that decode at once
TAIL = 32  # tokens, in which a closing tag stands
SAMPLING = {"temperature", "top_k", "top_p"}  # in which rows of one batch may differ


class Choice(Row):
    """A turn that a client waits for.

    Attributes:
        body: the request, which says how it is sampled.
        name: of the answer, as no other's; `created` is when it was asked for.
        chat: the Chat that reads its tokens.
        weights: the adapter that plays it, one of the values of `Player.adapters`.
        stop_ids: the ids that end it, instead of the engine's.
        closing: what ends a turn that was made to call a tool, or "". It ends as it has a call.
        prompt_logprobs: of the prompt's tokens at temperature 1, if they are asked for, else None.
        done: a Future that is done with the turn. It may raise.
    """

    prompt_logprobs = None

    def __init__(self, prompt, body, chat, weights, **options):
        super().__init__(prompt, group=tuple(prompt), **options)
        self.body, self.chat, self.weights = body, chat, weights
        self.name, self.created = f"turn-{secrets.token_hex(8)}", int(time.time())
        self.stop_ids = set(body.stop_token_ids)
        if not body.ignore_eos:
            self.stop_ids.update(chat.end_ids)
        self.stops = body.stop
        if isinstance(body.stop, str):
            self.stops = [body.stop]
        self.closing = closing_of(chat) if self.forced else ""
        self.has_call = False
        self.sampling = body.model_dump(include=SAMPLING, exclude_defaults=True)
        self.done = Future()

    def append(self, token, logprob, stop_ids):
        super().append(token, logprob, self.stop_ids)
        # Not each time, because all of the text is read.
        if self.stops and len(self.turn) % 8 == 0 and self.read()[1]:
            self.state = "ended"
        if self.closing and self.chat.text(self.turn[-TAIL:]).rstrip().endswith(self.closing):
            self.has_call = bool(whole_calls(self.chat.text(self.turn), self.chat.tools))
            if self.has_call:
                self.state = "ended"

    def read(self):
        """Return the text without what ended it, and why it ended, None if it has not."""
        # The state first: the engine's thread may sample meanwhile.
        has_ended = self.state == "ended"
        text, reason = self.chat.text(self.turn), None
        if has_ended:
            reason = "stop"
            if self.turn[-1] not in self.stop_ids and not self.has_call:
                reason = "length"
        for stop in self.stops:
            if stop in text:
                text, reason = text.partition(stop)[0], "stop"
        if not reason:
            # A stop text may have come by half, and the last character may lack some bytes.
            text = "" if self.stops else text.rstrip("\ufffd")
        return text, reason


class SharedEngine(Engine):
    """The engine for rows of several clients: each is sampled in its own way."""

    def sample(self, rows, logits):
        draw = self.draw
        for chosen in members(tuple(row.sampling.items()) for row in rows):
            self.draw = partial(draw, **rows[chosen[0]].sampling)
            super().sample([rows[i] for i in chosen], logits[chosen])
        self.draw = draw


class Player:
    """Decodes for all clients in one thread, and exchanges adapters.

    Rows of one adapter are decoded together. When another adapter is asked for, no more rows of the
    present one start; when the last has ended, the other one is merged and its rows play.

    Attributes:
        adapters: name -> what `exchange` takes. That of "base" is empty, unless the model that was
            started has an adapter which cannot be merged.
        playing: the one of them that the model has.
        coming: rows that no engine has yet.
    """

    def __init__(self, model, tokens, make_engine):
        self.model, self.tokens, self.make_engine = model, tokens, make_engine
        self.inbox = queue.SimpleQueue()
        self.playing = self.exchange({})
        self.adapters = {"base": self.playing}
        self.coming = []

    def add(self, choice):
        """Let a choice be sampled."""
        self.inbox.put(partial(self.coming.append, choice))

    def run(self):
        """Decode until the process ends."""
        while True:
            self.exchange(self.playing)
            with merged(self.model):
                self.engine = self.make_engine(
                    self.model, tokens=self.tokens, slots=SLOTS, kind=SharedEngine)
                try:
                    self.decode()
                except FloatingPointError as error:
                    # An adapter may do this. The next engine sees no NaN.
                    for row in filter(None, self.engine.owner + self.engine.waiting):
                        row.done.set_exception(ValueError(error))

    def decode(self):
        """Decode the rows of the adapter that plays, until others wait and these have ended."""
        while self.engine.busy or not self.coming or self.coming[0].weights is self.playing:
            while not self.inbox.empty() or not (self.engine.busy or self.coming):
                self.inbox.get()()
            while self.coming and self.coming[0].weights is self.playing:
                row = self.coming.pop(0)
                if getattr(row.body, "prompt_logprobs", None) is not None:
                    row.prompt_logprobs = self.score(row.body.prompt)
                self.engine.add([row])
            for row in self.engine.step():
                self.engine.release(row)
                row.done.set_result(row)
        self.playing = self.coming[0].weights
        self.coming.sort(key=lambda row: row.weights is not self.playing)

    @torch.no_grad()
    def score(self, ids):
        """Return the log-probabilities of these tokens by the adapter that plays, first 0.0."""
        token_ids = torch.tensor([ids], device=self.model.device)  # (1, T)
        logprobs, _ = token_logprobs(self.model, token_ids, torch.ones_like(token_ids))
        return logprobs[0].tolist()

    def load(self, name, folder):
        """Read an adapter in PEFT's format. Raises ValueError if it does not fit."""
        if name in self.adapters:
            raise ValueError(f"the adapter {name!r} has already been loaded")
        # Take off the adapter that rows may be playing while `adapt` puts on the new one.
        self.exchange({})
        try:
            adapt(self.model, read_settings(folder, {}), folder=folder)
        finally:
            loaded = self.exchange(self.playing)
        self.adapters[name] = loaded

    def exchange(self, adapter):
        """Give the model an adapter, {Linear: (lora, forward)}. Return the one that it had."""
        before = {}
        for linear in adapted_linears(self.model).values():
            before[linear] = linear.lora, linear.forward
            del linear.lora, linear.forward
        for linear, kept in adapter.items():
            linear.lora, linear.forward = kept
        return before
