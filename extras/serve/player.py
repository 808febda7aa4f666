"""One thread decodes for everybody who asks the server: their rows share one engine.

    player = Player(model, tokens=2048)
    threading.Thread(target=player.run, daemon=True).start()
    async for choice in player.play(choices): ...       # in the thread of the server

Only `run` touches the engine and the weights. The server's thread puts functions into its inbox,
and they are called between two decode steps.
"""
import asyncio
import queue
import time
from functools import partial
from os.path import commonprefix

from agent import make_engine
from core.data import members
from core.model import facts, read_settings
from core.engine import Engine, Row
from extras.fast.sampling import sample
from extras.fast.static_engine import slots_that_fit
from lora import adapt, adapted_forward, adapters, merged
from extras.serve.requests import BASE, Refusal

SECONDS = 600  # until a request must have been answered
TOGETHER = 0.01  # seconds in which others may join the first one


class Choice(Row):
    """A turn that a client waits for.

    Attributes:
        chat: the Chat that reads its tokens.
        weights: the adapter that plays it, one of the values of `Player.adapters`.
        sampling: temperature, top_k and top_p.
        stop_ids, stops: the ids and the texts that end it, instead of the engine's stop ids.
        streams: True if the server wants to know of every token.
        opening: the beginning of what it says, which stands in the prompt.
        news: the event that tells the server's thread to look.
        error: why it ended early, or None.
        text: what it says, without the stop token, a stop text or what may become one.
        reason: why it ended, "stop" or "length"; None before.
    """
    news = error = reason = None
    text = ""
    due = 0  # the number of tokens at which it is read again

    def __init__(self, prompt, *, chat, weights, sampling, stop_ids, stops=(), streams=False,
                 opening="", **options):
        super().__init__(prompt, group=tuple(prompt), **options)
        self.chat = chat
        self.weights = weights
        self.sampling = sampling
        self.stop_ids = frozenset(stop_ids)
        self.stops = stops
        self.longest = max(map(len, stops), default=1)
        self.streams = streams
        self.opening = opening

    @property
    def ids(self) -> list[int]:
        return [*self.group, *self.turn]

    def append(self, token, logprob, stop_ids):
        super().append(token, logprob, self.stop_ids)
        # To decode all of it for each token would hold up everybody. A character has at most four
        # tokens, and where a text begins, its first ones may be decoded in another way.
        text = self.chat.text(self.turn[-4 * self.longest - 8:]) if self.stops else ""
        if any(stop in text for stop in self.stops):
            self.state = "ended"

    def show(self):
        """Read what was sampled until now."""
        # Read the state first: the engine's thread may sample meanwhile.
        has_ended = self.state == "ended"
        turn = list(self.turn)
        if not has_ended and not (self.streams and len(turn) >= self.due):
            return
        # All of it is read again, which takes linear time if a long turn waits for more tokens.
        self.due = len(turn) * 257 / 256
        is_stop = not self.stop_ids.isdisjoint(turn[-1:])
        text = self.chat.text(turn[:len(turn) - is_stop])
        for stop in self.stops:
            text, found, _ = text.partition(stop)
            is_stop |= bool(found)
        if has_ended:
            self.reason = "stop" if is_stop else "length"
        else:
            # A stop text may have come by half, and the last character may lack some bytes.
            text = text.rstrip("\ufffd")
            text = text[:max(len(text) - self.longest + 1, 0)]
        self.text = self.opening + text


class SharedEngine(Engine):
    """The engine for rows of several clients: each is sampled, and ends, in its own way.

    A row whose turn has ended keeps its slot until another row needs it. When its conversation
    comes back, one message longer, only this message runs.
    """

    @property
    def busy(self) -> bool:
        return bool(super().busy or self.waiting)

    def sample(self, rows, logits):
        kinds = members(row.sampling for row in rows)
        for chosen in kinds:
            temperature, top_k, top_p = rows[chosen[0]].sampling
            self.draw = partial(sample, temperature=temperature, top_k=top_k, top_p=top_p)
            # Indexing copies. Mostly all rows are sampled alike.
            its_logits = logits if len(kinds) == 1 else logits[chosen]
            super().sample([rows[i] for i in chosen], its_logits)

    def enter(self, row):
        """Add a row, in the slot of an ended one if it continues that one's conversation."""
        ids = row.ids[:-1]

        def shared(old):
            return len(commonprefix([old.ids[:old.length], ids]))

        old = max(self.in_state("ended"), key=shared, default=None)
        # Sharing less than half would cost the other conversation its cache, should it come back. A
        # recurrent state cannot be rewound: there the whole old row must be shared.
        if not old or shared(old) < (old.length if self.cache.keeps_states else old.length / 2):
            self.add([row])
            return
        row.slot, row.length = old.slot, shared(old)
        row.pending = row.pending[row.length:]
        row.state = "prefill"
        self.owner[row.slot] = row

    def admit(self):
        missing = len(self.waiting) - self.owner.count(None)
        for row in self.in_state("ended")[:max(missing, 0)]:
            self.release(row)
        super().admit()


class Player:
    """Decodes for all clients in one thread, and exchanges adapters.

    Rows of one adapter are decoded together. When another adapter is asked for, no more rows of the
    present one start; when the last has ended, the other one is merged and its rows play.

    Attributes:
        tokens: of the longest row, with what it samples.
        adapters: name -> {Linear: its Adapter}. That of BASE is empty, unless the model that was
            started has one which cannot be merged.
        playing: the one of them that the model has.
        coming: rows that no engine has yet.
    """

    def __init__(self, model, tokens: int):
        self.model = model
        self.tokens = tokens
        self.inbox = queue.SimpleQueue()
        self.playing = {linear: linear.lora for linear in adapters(model).values()}
        self.adapters = {BASE: self.playing}
        self.coming = []

    # ----------------------------------------------------------------------- in the server's thread
    async def play(self, choices):
        """Let choices be sampled. Yield one whenever it has grown or ended, until all have.

        However this generator is left, they leave the engine. Raises Refusal if one cannot be
        sampled, or not in time.
        """
        self.loop = asyncio.get_running_loop()
        end = self.loop.time() + SECONDS
        news = asyncio.Event()
        for choice in choices:
            choice.news = news
        self.inbox.put(partial(self.arrive, choices))
        waiting = list(choices)
        try:
            while waiting:
                async with asyncio.timeout_at(end):
                    await news.wait()
                news.clear()
                for choice in list(waiting):
                    if choice.error:
                        raise Refusal(500, choice.error)
                    text = choice.text
                    choice.show()
                    if choice.reason:
                        waiting.remove(choice)
                    if choice.reason or choice.text != text:
                        yield choice
        except TimeoutError:
            raise Refusal(408, f"not answered within {SECONDS} s", "timeout") from None
        finally:
            self.inbox.put(partial(self.leave, choices))

    # --------------------------------------------------------------------------- in its own thread
    def run(self):
        """Decode until the process ends."""
        while True:
            with merged(self.model):
                most = facts(self.model).decode_rows
                self.engine = make_engine(
                    self.model, tokens=self.tokens, kind=SharedEngine,
                    slots=slots_that_fit(self.model, self.tokens, most))
                # A cache that grows is copied, and on a CPU its free slots become memory as well.
                self.engine.cache.reserve(self.tokens)
                self.enter()
                try:
                    self.decode()
                except FloatingPointError as error:
                    # An adapter may do this. The next engine sees no NaN.
                    self.fail(str(error))
                # Its weights and its cache go before the next engine has its own.
                self.engine = None
            if self.coming:
                self.playing = self.coming[0].weights
                self.exchange(self.playing)

    def decode(self):
        """Decode the rows of the adapter that plays, until others wait and these have ended."""
        while self.engine.busy or not self.coming:
            if not self.engine.busy:
                self.inbox.get()()
                # Those who ask at the same time start in the same batch.
                time.sleep(TOGETHER)
            while not self.inbox.empty():
                self.inbox.get()()
            for row in self.engine.step() + self.engine.in_state("decode"):
                if row.streams or row.state == "ended":
                    self.tell(row)

    def arrive(self, rows):
        """Take new rows. They start unless some wait for another adapter."""
        self.coming += rows
        if all(row.weights is self.playing for row in self.coming):
            self.enter()

    def enter(self):
        """Give the engine the rows that wait for the adapter that plays."""
        for row in [row for row in self.coming if row.weights is self.playing]:
            self.coming.remove(row)
            self.engine.enter(row)

    def leave(self, rows):
        """Let go of rows whose client does not wait any more."""
        for row in rows:
            row.state = "ended"
            for queued in (self.coming, self.engine.waiting):
                if row in queued:
                    queued.remove(row)

    def fail(self, reason: str):
        """End all rows that the engine has. Those that have ended keep what they sampled."""
        for row in self.engine.owner + self.engine.waiting:
            if row:
                if row.state != "ended":
                    row.error = reason
                self.tell(row)

    def tell(self, row):
        """Let the server's thread know that a row has sampled."""
        self.loop.call_soon_threadsafe(row.news.set)

    # ------------------------------------------------------------------------------------ adapters
    def load(self, name: str, folder: str):
        """Read an adapter in PEFT's format. Raises ValueError if it does not fit."""
        if name in self.adapters:
            raise ValueError(f"the adapter {name!r} has already been loaded")
        known = facts(self.model)
        config = read_settings(folder, known.kind.peft_entries)
        for form in filter(None, config["quantized_base"].split(",")):
            if form not in known.stored_as:
                raise ValueError(f"{folder} was trained beside weights in {form}, which those of "
                                 "this server are not; start a server with it")
        # Take off the adapter that rows may be playing while `adapt` puts on the new one.
        self.exchange({})
        try:
            adapt(self.model, config, folder=folder)
        finally:
            loaded = self.exchange(self.playing)
        self.adapters[name] = loaded

    def exchange(self, adapter: dict) -> dict:
        """Give the model an adapter, {Linear: Adapter}. Returns the one that it had."""
        before = {linear: linear.lora for linear in adapters(self.model).values()}
        for linear in before:
            del linear.lora, linear.forward
        for linear, lora in adapter.items():
            linear.lora = lora
            linear.forward = partial(adapted_forward, linear)
        return before
