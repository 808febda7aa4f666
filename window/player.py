"""One thread decodes for everybody who asks the server: their rows share one engine.

    player = Player(model, slots=64)
    threading.Thread(target=player.run, daemon=True).start()
    async for choice in player.play(choices): ...       # in the thread of the server

Only `run` touches the engine and the weights. The server's thread puts functions into its inbox,
and they are called between two decode steps.
"""
import asyncio
import math
import queue
from concurrent.futures import Future
from functools import partial
from os.path import commonprefix

from experiment.errors import UserError
from llm.adapter_files import load_weights, read_settings
from llm.engine import Engine, Row
from llm.sampling import sample
from lora import adapter_tensors, add_lora, merged, settings
from window.requests import BASE, Refusal


class Choice(Row):
    """A turn that a client waits for.

    Attributes:
        ids: all of its ids that the cache may hold.
        chat: the Chat that reads its tokens.
        weights: the adapter that plays it, one of the values of `Player.adapters`.
        sampling: temperature, top_k and top_p.
        stop_ids, stops: the ids and the texts that end it.
        streams: True if the server wants to know of every token.
        news: where the server's thread hears of it.
        error: why it ended early, or None.
        shown: the tokens that count: none come after a stop text.
        text: what they say, without the stop token or the stop text.
        reason: why it ended, "stop" or "length"; None before.
    """
    news = error = reason = None
    shown, text = (), ""

    def __init__(self, prompt, *, chat, weights, sampling, stop_ids, stops=(), streams=False,
                 **options):
        super().__init__(prompt, group=tuple(prompt), **options)
        self.ids = list(prompt)
        self.chat = chat
        self.weights = weights
        self.sampling = sampling
        self.stop_ids = frozenset(stop_ids)
        self.stops = stops
        self.streams = streams or bool(stops)

    def show(self, count: int, has_ended: bool):
        """Show the first `count` tokens to the client."""
        self.shown = self.turn[:count]
        is_stop = self.shown[-1] in self.stop_ids
        self.text = self.chat.text(self.shown[:count - is_stop])
        cuts = [self.text.index(stop) for stop in self.stops if stop in self.text]
        if cuts:
            self.text = self.text[:min(cuts)]
        if cuts or has_ended:
            self.reason = "stop" if cuts or is_stop else "length"


class SharedEngine(Engine):
    """The engine for rows of several clients: each is sampled, and ends, in its own way.

    A row whose turn has ended is parked: it keeps its slot until another row needs it. When its
    conversation comes back, one message longer, only this message runs.
    """

    def __init__(self, model, slots: int):
        super().__init__(model, slots=slots)
        self.parked = []  # the longest parked first

    @property
    def busy(self) -> bool:
        return bool(super().busy or self.waiting)

    def sample(self, rows, logits):
        kinds = {}
        for i, row in enumerate(rows):
            kinds.setdefault(row.sampling, []).append(i)
        for (temperature, top_k, top_p), chosen in kinds.items():
            self.draw = partial(sample, temperature=temperature, top_k=top_k, top_p=top_p)
            super().sample([rows[i] for i in chosen], logits[chosen])

    def take(self, row, token, logprob):
        if math.isnan(logprob):
            # An adapter may do this. Other rows continue, and the next in this slot sees no NaN.
            for tensor in self.cache.prefix(row.slot, self.cache.capacity):
                tensor.zero_()
            row.error = "the model's logits are not finite"
            row.state = "ended"
            self.ended.append(row)
            return
        self.stop_ids = row.stop_ids
        super().take(row, token, logprob)

    def step(self):
        ended = super().step()
        for row in ended:
            self.park(row)
        return ended

    def park(self, row):
        """Let go of a row in a slot."""
        row.state = "ended"
        row.ids += row.turn
        self.parked.append(row)

    def enter(self, row):
        """Add a row. It takes over the parked one whose conversation it continues."""
        shared, best = 0, None
        for old in self.parked:
            length = len(commonprefix([old.ids[:old.length], row.ids[:-1]]))
            # Less of it would be a loss, should the other conversation come back. There is no way
            # back to an earlier state.
            least = old.length - 1 if self.cache.keeps_states else old.length // 2
            if length > max(shared, least) and not old.error:
                shared, best = length, old
        if best is None:
            self.add([row])
            return
        self.parked.remove(best)
        row.slot, row.length = best.slot, shared
        row.pending = row.ids[shared:]
        row.state = "prefill"
        self.owner[row.slot] = row

    def leave(self, row):
        """Let go of a row whose client does not wait any more."""
        if row in self.waiting:
            self.waiting.remove(row)
        elif row.state != "ended":
            self.park(row)

    def admit(self):
        while self.parked and len(self.waiting) > self.owner.count(None):
            self.release(self.parked.pop(0))
        super().admit()


class Player:
    """What the thread does.

    Rows of one adapter are decoded together. When another adapter is asked for, no more rows of the
    present one start; when the last has ended, the other one is merged and its rows play.

    Attributes:
        adapters: name -> its tensors. Those of BASE are of the adapter that was started, if any.
        playing: the one of them that is merged.
    """

    def __init__(self, model, slots: int):
        self.model = model
        self.slots = slots
        self.inbox = queue.SimpleQueue()
        self.loop = None  # the server's
        self.coming = []  # rows that no engine has yet
        self.adapters = {BASE: self.copy_weights()}
        self.playing = self.adapters[BASE]
        self.engine = None

    # ----------------------------------------------------------------------- in the server's thread
    async def play(self, choices):
        """Let choices be sampled. Yield one whenever it has grown or ended, until all have.

        However this generator is left, they leave the engine. Raises Refusal if one cannot be
        sampled.
        """
        self.loop = asyncio.get_running_loop()
        news = asyncio.Queue()
        for choice in choices:
            choice.news = news
        self.inbox.put(partial(self.coming.extend, choices))
        try:
            while not all(choice.reason for choice in choices):
                choice, count, has_ended = await news.get()
                if choice.error:
                    raise Refusal(500, choice.error)
                if not choice.reason:
                    choice.show(count, has_ended)
                    yield choice
        finally:
            self.inbox.put(partial(self.leave, choices))

    def deliver(self, news):
        for row, count, has_ended in news:
            row.news.put_nowait((row, count, has_ended))

    # --------------------------------------------------------------------------- in its own thread
    def run(self):
        """Decode until the process ends."""
        while True:
            if self.coming:
                self.playing = self.coming[0].weights
                self.set_weights(self.playing)
            with merged(self.model):
                self.decode()

    def decode(self):
        """Decode the rows of the adapter that plays, until others wait and these have ended."""
        engine = self.engine = SharedEngine(self.model, self.slots)
        self.enter()
        while engine.busy or not self.coming:
            while not (engine.busy or self.coming) or not self.inbox.empty():
                self.inbox.get()()
            if all(row.weights is self.playing for row in self.coming):
                self.enter()
            if engine.busy:
                ended = engine.step()
                running = engine.in_state("decode")
                self.tell([*ended, *(row for row in running if row.streams)], ended)

    def enter(self):
        """Give the engine the rows that wait for the adapter that plays."""
        for row in [row for row in self.coming if row.weights is self.playing]:
            self.coming.remove(row)
            self.engine.enter(row)

    def tell(self, rows, ended):
        """Let the server's thread know what some rows have sampled."""
        news = [(row, len(row.turn), row in ended) for row in rows]
        if news:
            self.loop.call_soon_threadsafe(self.deliver, news)

    def leave(self, rows):
        for row in rows:
            if row in self.coming:
                self.coming.remove(row)
            elif self.engine:
                self.engine.leave(row)

    # ------------------------------------------------------------------------------------ adapters
    def load(self, name: str, folder: str):
        """Read an adapter in PEFT's format. Raises UserError if it does not fit."""
        config = read_settings(folder)
        if not settings(self.model):
            add_lora(self.model, config["r"], config["lora_alpha"],
                     targets=config["target_modules"], use_rslora=bool(config.get("use_rslora")))
            # The model as it was started is now one whose B is zero.
            self.adapters[BASE].update(self.copy_weights())
        # The shapes are compared by load_weights.
        ours = settings(self.model).peft
        for key in ("r", "lora_alpha", "use_rslora"):
            if (config.get(key) or 0) != ours[key]:
                raise UserError(f"{folder}: {key} is {config.get(key)}; this server plays adapters "
                                f"like the first one that it loaded, of {key} {ours[key]}")
        try:
            load_weights(self.model, folder)
            self.adapters[name] = self.copy_weights()
        finally:
            # Rows may be playing.
            self.set_weights(self.playing)

    def copy_weights(self) -> dict:
        return {name: p.detach().clone() for name, p in adapter_tensors(self.model).items()}

    def set_weights(self, weights):
        for name, p in adapter_tensors(self.model).items():
            p.data.copy_(weights[name])


async def elsewhere(start, function, *arguments):
    """Let `start` run a function in another thread. Return or raise what it does."""
    outcome = Future()

    def run():
        # Otherwise nobody waits any more.
        if outcome.set_running_or_notify_cancel():
            try:
                outcome.set_result(function(*arguments))
            except Exception as error:
                outcome.set_exception(error)
    start(run)
    return await asyncio.wrap_future(outcome)
