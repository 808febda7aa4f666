"""One thread that decodes for everybody who asks the server: their rows share one engine.

    player = Player(model, slots=64)
    player.start()
    turn = await player.turn(request, row)       # add a row, and wait for its turn to end
    turn = await player.turn(request, row, tool_result_ids, limit)      # its next turn
    player.leave(row)                            # at any time: its slot is free at once

Others put work into the thread's inbox; only the thread touches the model and the engine. Rows of
one adapter are decoded together. Where another one is asked for, no new rows of the present one
start; when the last has ended, the other's weights are merged and its rows play.
"""
import asyncio
import queue
import threading
from dataclasses import dataclass, field
from functools import partial
from os.path import commonprefix

import torch

from experiment.errors import UserError, first_line
from llm.adapter_files import load_weights, read_settings
from llm.engine import Engine, Row
from llm.sampling import sample
from lora import adapter_tensors, add_lora, merged, settings

BASE = "base"  # the name of the model without an adapter
SHARED = 16  # tokens that a prompt must share with a parked row to take it over


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a row are drawn, and what ends its turn."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_ids: frozenset = frozenset()


@dataclass(eq=False)
class Seat:
    """What the player knows of a row: who waits for it, and how it is sampled."""

    row: Row
    sampling: Sampling
    adapter: str
    told: asyncio.Queue  # a number of tokens whenever there are more, None at the end of the turn
    loop: asyncio.AbstractEventLoop
    streams: bool = False
    stops: object = None  # function of the turn's ids: True where a stop text has come
    heard: int = field(default=0)

    def tell(self, what):
        self.loop.call_soon_threadsafe(self.told.put_nowait, what)


class SharedEngine(Engine):
    """The engine with the `Sampling` of each row, in `seats`."""

    def __init__(self, model, slots, seats):
        super().__init__(model, slots=slots)
        self.seats = seats
        self.parked = []  # rows that have left, the longest gone first: their slots are kept

    @property
    def busy(self) -> bool:
        return bool(super().busy or self.waiting and self.parked)

    def sample(self, rows, logits):
        kinds = {}
        for i, row in enumerate(rows):
            s = self.seats[row].sampling
            kinds.setdefault((s.temperature, s.top_k, s.top_p), []).append(i)
        for (temperature, top_k, top_p), chosen in kinds.items():
            self.draw = partial(sample, temperature=temperature, top_k=top_k, top_p=top_p)
            super().sample([rows[i] for i in chosen], logits[chosen])

    def take(self, row, token, logprob):
        self.stop_ids = self.seats[row].sampling.stop_ids
        super().take(row, token, logprob)

    def enter(self, row):
        """Add a row. It takes over the parked one that begins most like it.

        A conversation comes back with one more message: only this is new.
        """
        row.ids = row.group
        shared = {old: len(commonprefix([old.ids[:old.length], row.ids[:-1]]))
                  for old in self.parked}
        best = max(shared, key=shared.get, default=None)
        if not best or shared[best] < SHARED:
            self.add([row])
            return
        self.parked.remove(best)
        row.slot, row.length = best.slot, shared[best]
        row.pending = list(row.ids[row.length:])
        row.state = "prefill"
        self.owner[row.slot] = row

    def extend(self, row, ids, limit):
        row.ids = (*row.ids, *row.turn, *ids)
        super().extend(row, ids, limit)

    def leave(self, row):
        """Park a row: its slot is kept as long as no other needs it."""
        if row.slot is None:
            self.waiting.remove(row)
            return
        row.state = "ended"
        row.ids = (*row.ids, *row.turn)
        self.parked.append(row)

    def admit(self):
        """Give free slots to waiting rows, if need be those that have been parked the longest."""
        missing = min(len(self.waiting) - self.owner.count(None), len(self.parked))
        for row in self.parked[:max(missing, 0)]:
            self.release(row)
        del self.parked[:max(missing, 0)]
        super().admit()


class Player(threading.Thread):
    """The thread. Attributes: `adapters`, {name: its tensors}; `broken`, the error that ended it."""

    def __init__(self, model, slots: int):
        super().__init__(daemon=True)
        self.model, self.slots = model, slots
        self.inbox = queue.SimpleQueue()  # functions to call between two decode steps
        self.seats = {}  # row -> Seat, of the rows that play
        self.coming = []  # seats whose adapter is not the one that plays
        self.adapters = {}
        self.current = BASE
        self.broken = None

    # ------------------------------------------------------------------------ called by the server
    async def turns(self, seat: Seat, ids=(), limit=None):
        """Start a row, or its next turn with these ids before it. Yield as tokens come; end with it.

        Raises RuntimeError if the engine has failed.
        """
        begin = partial(self._extend, seat, ids, limit) if limit else partial(self._enter, seat)
        self.inbox.put(begin)
        while True:
            what = await seat.told.get()
            if isinstance(what, BaseException):
                raise RuntimeError(f"the engine failed: {first_line(what)}")
            if what is None:
                return
            yield what

    async def turn(self, seat: Seat, ids=(), limit=None):
        """Wait for the end of a row's turn."""
        async for _ in self.turns(seat, ids, limit):
            pass

    def leave(self, seat: Seat):
        """Free the row's slot, whether its turn has ended or its client has gone."""
        self.inbox.put(partial(self._leave, seat))

    async def adapter(self, change, *args):
        """Call a method that changes the adapters, in the thread. Raises what it raises."""
        answer, loop = asyncio.Future(), asyncio.get_running_loop()

        def act():
            try:
                result = change(*args)
                loop.call_soon_threadsafe(answer.set_result, result)
            except Exception as error:
                loop.call_soon_threadsafe(answer.set_exception, error)
        self.inbox.put(act)
        return await answer

    # ----------------------------------------------------------------------- called in the thread
    def run(self):
        try:
            while True:
                while not self.coming:
                    self.inbox.get()()
                self._put_on(self.coming[0].adapter)
                with merged(self.model):
                    self._play()
        except BaseException as error:
            self.broken = error
            for seat in [*self.seats.values(), *self.coming]:
                seat.tell(error)

    def _play(self):
        """Decode the rows of the current adapter, until all have left and others wait."""
        self.engine = SharedEngine(self.model, self.slots, self.seats)
        self._admit()
        while self.seats or not self.coming:
            if not self.engine.busy:
                self.inbox.get()()
            while not self.inbox.empty():
                self.inbox.get()()
            if all(seat.adapter == self.current for seat in self.coming):
                self._admit()
            if self.engine.busy:
                for row in self.engine.step():
                    self._end(self.seats[row])
                self._report()

    def _admit(self):
        """Let the rows that wait for the current adapter enter the engine."""
        entering = [seat for seat in self.coming if seat.adapter == self.current]
        self.coming = [seat for seat in self.coming if seat.adapter != self.current]
        self.seats.update({seat.row: seat for seat in entering})
        for seat in entering:
            self.engine.enter(seat.row)

    def _report(self):
        """Tell those who stream, or look for a stop text, what their rows have sampled."""
        for seat in list(self.seats.values()):
            row = seat.row
            if row.state == "decode" and len(row.turn) > seat.heard:
                seat.heard = len(row.turn)
                if seat.stops and seat.stops(row.turn):
                    row.state = "ended"
                    self._end(seat)
                elif seat.streams:
                    seat.tell(seat.heard)

    def _end(self, seat):
        seat.heard = 0
        seat.tell(None)

    def _enter(self, seat):
        self.coming.append(seat)

    def _extend(self, seat, ids, limit):
        self.engine.extend(seat.row, ids, limit)

    def _leave(self, seat):
        if seat in self.coming:
            self.coming.remove(seat)
        elif self.seats.pop(seat.row, None):
            self.engine.leave(seat.row)

    # ---------------------------------------------------------------------------------- adapters
    def load(self, name: str, folder: str):
        """Read an adapter in PEFT's format. Raises UserError if it does not fit."""
        given = _what_counts(read_settings(folder))
        if not settings(self.model):
            add_lora(self.model, given["r"], given["lora_alpha"], targets=given["target_modules"],
                     use_rslora=given["use_rslora"])
        own = _what_counts(settings(self.model).peft)
        if given != own:
            raise UserError(f"{folder}: the adapter is {given}, and the first one that this server "
                            f"loaded is {own}")
        # The rows that play need the present weights: read beside them.
        present = {n: p.detach().clone() for n, p in adapter_tensors(self.model).items()}
        load_weights(self.model, folder)
        self.adapters[name] = {n: p.detach().clone()
                               for n, p in adapter_tensors(self.model).items()}
        self._set(present)

    def unload(self, name: str):
        """Forget an adapter. Raises KeyError if there is none of this name."""
        del self.adapters[name]

    def _put_on(self, name):
        """Make the adapter of this name, or none, what the model plays."""
        if self.current != name:
            self.current = name
            self._set(self.adapters.get(name))

    def _set(self, tensors):
        """Give the adapter these weights, or zeros."""
        for name, p in adapter_tensors(self.model).items():
            p.data.copy_(tensors[name] if tensors else torch.zeros_like(p))


def _what_counts(config) -> dict:
    """Return what of an adapter_config.json decides how the adapter's weights are applied."""
    return {"r": config["r"], "lora_alpha": config["lora_alpha"],
            "target_modules": sorted(config["target_modules"]),
            "use_rslora": bool(config.get("use_rslora"))}
