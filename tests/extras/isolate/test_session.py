"""extras/isolate: one thread makes all calls of an episode, and a call that holds the interpreter's lock ends the process."""
import contextlib
import gc
import io
import os
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from types import SimpleNamespace

import programs
import pytest

import agent
import envs
import envs.session
from agent import Limits, rollout
from core.config import EnvironmentFault
from extras.stop import Stop
from core.data import to_json
from envs.tasks import load_tasks
from extras import isolate
import schooling
from schooling import demonstrate
from extras.isolate import Session, Watch
from core.tiny import make_tiny


class Shop:
    """A connection that only the thread which opened it may use, as sqlite3 checks."""
    threads = []

    def __init__(self):
        self.db = sqlite3.connect(":memory:")
        self.db.execute("create table sold (name text)")
        Shop.threads.append({threading.get_ident()})
        self.mine = Shop.threads[-1]

    def touch(self) -> str:
        """Count what was sold."""
        self.mine.add(threading.get_ident())
        return str(self.db.execute("select count(*) from sold").fetchone()[0])

    def reset(self, **_):
        self.touch()
        return "Sell a hat."

    def sell(self, name: str) -> str:
        """Sell something.

        Args:
            name: what
        """
        if name == "nothing":
            raise ValueError(name)
        self.db.execute("insert into sold values (?)", [name])
        return self.touch()

    def get_reward(self) -> float:
        return float(self.touch())

    def _reply(self, text):
        return "Go on." if self.touch() == "1" and "again" in text else None

    def _check(self) -> bool:
        return self.touch() == "2"

    def _expert(self):
        sold = int(self.touch())
        return [{"name": "sell", "arguments": {"name": "hat"}}] if sold < 2 else "Sold."


class Eats:
    """It changes what its row holds, as a Sudoku that writes into the board of its data set does."""

    def reset(self, board, **_):
        self.board = board
        return f"Eat {board}."

    def eat(self) -> int:
        """Eat one."""
        return self.board.pop()

    def done(self) -> str:
        """Say that all is eaten: a tool of this name ends no episode."""
        return f"{len(self.board)} left"

    def get_reward(self):
        return 1.0


def test_an_environment_may_change_its_row_and_have_a_tool_done():
    task = {"board": [1, 2]}
    for _ in range(2):
        session = Session(Watch(10.0), "eats", Eats, task)
        assert session.start()[0] == [{"role": "user", "content": "Eat [1, 2]."}]
        session.submit([{"name": name, "arguments": {}} for name in ("eat", "done", "eat")])
        assert [text for text, _, _ in session.results()] == ["2", "1 left", "1"] and not session.done
    assert task == session.task == {"board": [1, 2]}


def shop(watch=None):
    return Session(watch or Watch(10.0), "shop", Shop, {})


def test_a_reward_that_cancels_out_is_no_success():
    """It was 0.1 + 0.2 - 0.3 = 5.6e-17, above 0, and counted in the success of a run and in pass@k."""
    class Cancels:
        def reset(self):
            return "Go."

        def get_reward(self):
            return 0.1 + 0.2 - 0.3
    session = Session(Watch(10.0), "cancels", Cancels, {})
    session.start()
    total, _, success = session.score()
    assert 0 < total < 1e-15 and success is False


def sell(session, *names):
    session.submit([{"name": "sell", "arguments": {"name": name}} for name in names])
    return [text for text, _, _ in session.results()]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(envs.ENVS, "shop", f"{__name__}:Shop")
    Shop.threads.clear()


def test_all_calls_of_an_episode_come_from_one_thread():
    first, second = shop(), shop()
    for session in (first, second):
        session.start()
    assert sell(first, "hat", "coat") == ["1", "2"] and sell(second, "hat") == ["1"]
    assert second.reply("again") == ("Go on.", 0.0) and first.expert() == ("Sold.", [])
    assert first.score() == (2.0, {}, True) and second.score() == (1.0, {}, False)
    one, other = Shop.threads
    assert len(one) == len(other) == 1 and one != other and threading.get_ident() not in one | other


def test_what_is_no_tool_may_be_async_too():
    """A coroutine that nobody awaits is true: every episode would count as solved."""
    class Asks:
        async def reset(self):
            self.asked = 0
            return "Sure?"

        async def _reply(self, text):
            self.asked += 1
            return "Again?" if self.asked < 2 else None

        async def _check(self):
            return self.asked == 2

        async def _expert(self):
            return "Yes."

        async def get_reward(self):
            return 1.0
    session = Session(Watch(10.0), "asks", Asks, {})
    session.start()
    assert session.expert() == ("Yes.", []) and session.score() == (1.0, {}, False)
    assert session.reply("Yes.") == ("Again?", 0.0) and session.reply("Yes.") == (None, 0.0) and session.score() == (1.0, {}, True)


def test_rollouts_and_demonstrations_play_it_too():
    model, tokenizer = make_tiny()
    episodes = rollout(model, tokenizer, "shop", [{}], 3, limits=Limits(max_new_tokens=4))
    assert [t.info.get("error") for t in episodes] == [None] * 3 and [len(ids) for ids in Shop.threads] == [1] * 3
    shown = demonstrate(tokenizer, "shop", [{}] * 2)
    assert [t.info["success"] for t in shown] == [True] * 2 and [len(ids) for ids in Shop.threads] == [1] * 5


def test_reset_gets_the_columns_that_it_takes_and_no_others():
    """A reset without **_ passed extras.check, and sft.py gave it the expert's noise: TypeError, ten times."""
    class Strict:
        def reset(self, city: str):
            self.city = city
            return city

        def get_reward(self):
            return 1.0
    session = Session(Watch(10.0), "strict", Strict, {"city": "Rome", "noise": 0.6, "country": "Italy"})
    assert session.start()[0] == [{"role": "user", "content": "Rome"}] and session.task["country"] == "Italy"
    with pytest.raises(EnvironmentFault, match="missing 1 required positional argument: 'city'"):
        Session(Watch(10.0), "strict", Strict, {"town": "Rome"}).start()


def test_the_temporary_directory_of_an_instance_goes_with_its_episode():
    class Files:
        def reset(self):
            self.folder = tempfile.TemporaryDirectory()
            return self.folder.name

        def fail(self):
            """Fail."""
            raise OSError
    session = Session(Watch(10.0), "files", Files, {})
    [question], _ = session.start()
    session.submit([{"name": "fail", "arguments": {}}])
    assert session.results() == [("error: OSError: ", True, 0.0)] and os.path.isdir(question["content"])
    del session
    until = time.monotonic() + 20
    while os.path.isdir(question["content"]) and time.monotonic() < until:
        gc.collect()
    assert not os.path.isdir(question["content"])


def left(before):
    until = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    return threading.active_count() - before


def test_a_thread_ends_with_its_session_whatever_ended_that():
    """Without the garbage collector, which a thread would have to wait for."""
    before = threading.active_count()
    gc.disable()
    try:
        sessions = [shop() for _ in range(512)]
        for session in sessions:
            session.start()
        assert threading.active_count() > before + 500
        assert sell(sessions[0], "nothing", "hat")[0].startswith("error: ValueError") and sessions[0].score()[0] == 1.0
        sessions[1].env.get_reward = None
        with pytest.raises(EnvironmentFault, match="get_reward.. on task .* raised TypeError"):
            sessions[1].score()
        del session, sessions
        assert left(before) <= 0
    finally:
        gc.enable()


def test_the_timer_runs_through_calls_in_a_row_and_stops_when_none_runs(monkeypatch):
    """Each start makes a thread: 1,400 demonstrations would make 30,000."""
    started, stopped = [], []
    monkeypatch.setattr(isolate.faulthandler, "dump_traceback_later", lambda *a, **k: started.append(a))
    monkeypatch.setattr(isolate.faulthandler, "cancel_dump_traceback_later", lambda: stopped.append(len(watch.running)))
    watch = Watch(10.0)
    with watch:
        for _ in range(20):
            session = shop(watch)
            session.start()
            session.submit([{"name": "sell", "arguments": {"name": "hat"}}])
            session.results()
        # Once by the first call, and by the thread that starts it anew each second while calls run.
        assert 1 <= len(started) <= 5 and watch.is_timed and not watch.running
        watch._set_timer()
        assert not watch.is_timed and stopped[-1] == 0
        session = shop(watch)
        before = len(started)
        session.start()
        assert watch.is_timed and len(started) > before



HANGS = '''
import re, time
from extras import isolate as session

class Bomb:
    def reset(self, **_):
        return "go"
    def search(self) -> str:
        """Match a pattern that takes for ever, which holds the interpreter's lock."""
        return str(re.fullmatch("(a|a)+b", "a" * 60))
    def nap(self) -> str:
        """Sleep, which does not."""
        time.sleep(3.0)
        return "slept"
    def get_reward(self):
        return 0.0

session.HANG_SECONDS = 2.0
def start(watch):
    one = session.Session(watch, "bomb", Bomb, {})
    one.start()
    return one
def submit(one, name):
    one.submit([{"name": name, "arguments": {}}])
watch = session.Watch(0.2).__enter__()
one = start(watch)
submit(one, "nap")
print(one.results(), flush=True)  # timed out
patient = session.Watch(4.0).__enter__()
two = start(patient)
submit(two, "nap")
print(two.results(), flush=True)
watch.__exit__(), patient.__exit__()  # each would stop the timer of all
session.HANG_SECONDS = 0.5
try:
    with session.Watch(0.2) as stopped:
        submit(start(stopped), "nap")
        time.sleep(0.2)
        raise KeyboardInterrupt
except KeyboardInterrupt:
    time.sleep(1.0)
print("alive", flush=True)
session.HANG_SECONDS = 2.0
three = start(session.Watch(0.2).__enter__())
submit(three, "search")
print(three.results())
'''


def test_a_call_that_holds_the_interpreters_lock_ends_the_process_and_is_named(tmp_path):
    """And none that only sleeps: not when it times out, nor within its time, nor when the rollout was stopped."""
    path = tmp_path / "bomb.py"
    path.write_text(HANGS)
    began = time.monotonic()
    done = programs.run(path)
    assert done.returncode == 1 and time.monotonic() - began < 100
    timed_out, slept, alive = done.stdout.splitlines()
    assert "TimeoutError" in timed_out and "slept" in slept and alive == "alive"
    assert done.stderr.startswith("Timeout (0:00:02.2") and 'bomb.py", line 10 in search' in done.stderr, done.stderr


@pytest.mark.parametrize("how", ["late", "stopped"])
def test_a_call_that_was_left_behind_is_the_last_of_its_turn(how):
    """What the model called after it would change an environment that nobody asks any more, or write into a file of the next run."""
    log, gate = [], threading.Event()

    class Waits:
        def reset(self, **_):
            return "Go."

        def wait(self):
            """Wait."""
            log.append("wait")
            gate.wait(10)

        def act(self):
            """Act."""
            log.append("act")
    with Watch(0.2 if how == "late" else 10.0) as watch:
        session = Session(watch, "waits", Waits, {})
        session.start()
        session.submit([{"name": name, "arguments": {}} for name in ("wait", "act")])
        if how == "late":
            assert ["no answer within 0.2 s" in text for text, _, _ in session.results()] == [True, True]
            gate.set()
            session.outcome.exception(10)
        while not log:
            time.sleep(0.01)
    gate.set()
    assert isinstance(session.outcome.exception(10), SystemExit) and log == ["wait"]


# ------------------------------------------------------------------------------- what episodes share: process and thread
class Captures:
    """Python as many write it as a tool: what is printed goes to a buffer in place of sys.stdout."""
    limits = {"max_new_tokens": 64}

    def reset(self, n, **_):
        self.n = n
        return f"Print {n}."

    def python(self, code: str) -> str:
        """Run Python.

        Args:
            code: what to run
        """
        buffer = io.StringIO()
        with contextlib.redirect_stdout(buffer):
            time.sleep(0.05 * (1 + int(code)))  # the last to begin ends last
            print(code)
        return buffer.getvalue()

    def limit(self) -> str:
        """Work for a second at most."""
        return str(signal.signal(signal.SIGALRM, signal.SIG_DFL))

    def get_reward(self) -> float:
        return 0.0

    def _expert(self):
        return [{"name": "python", "arguments": {"code": str(self.n)}}]


class Locked(Captures):
    """The same with the lock that the message advises."""
    LOCK = threading.Lock()

    def python(self, code: str) -> str:
        """Run Python.

        Args:
            code: what to run
        """
        with self.LOCK:
            return super().python(code)


def captured(cls):
    """Let eight episodes print a number each. Returns the results."""
    with Watch(5.0) as watch:
        sessions = [Session(watch, cls.__name__, cls, {"n": n}) for n in range(8)]
        for session in sessions:
            session.start()
        for session in sessions:
            session.submit(session.expert()[1])
        texts = [text for session in sessions for text, _, _ in session.results()]
    watch.check()
    return texts


def test_tools_that_change_what_the_process_shares_are_found_out():
    """Results of other episodes would be trained on, and the program's own lines go into a buffer."""
    stdout = sys.stdout
    with pytest.raises(EnvironmentFault, match="tools replaced sys.stdout .* hold a threading.Lock"):
        captured(Captures)
    assert sys.stdout is stdout
    assert captured(Locked) == [f"{n}\n" for n in range(8)]


def test_a_signal_in_a_tool_is_not_the_models_fault():
    """Signals need the main thread. Ten such answers in a row end the run."""
    with Watch(5.0) as watch:
        session = Session(watch, "captures", Captures, {"n": 1})
        session.start()
        for _ in range(10):
            session.submit([{"name": "limit", "arguments": {}}])
            assert "main thread" in session.results()[0][0]
        with pytest.raises(EnvironmentFault, match="limit on task .* raised ValueError: signal only works"):
            watch.check()


@pytest.mark.parametrize("error, is_fault", [
    *((kind, False) for kind in (ValueError, TypeError, KeyError, IndexError, ZeroDivisionError, OverflowError, SyntaxError, AssertionError)),
    *((kind, True) for kind in (RuntimeError, OSError, NameError, AttributeError, MemoryError, SystemExit))])
def test_which_errors_of_a_tool_the_models_arguments_explain(error, is_fault):
    class Fails:
        def reset(self, **_):
            return "Go."

        def act(self):
            """Act."""
            raise error("no")
    with Watch(5.0) as watch:
        session = Session(watch, "fails", Fails, {})
        session.start()
        session.submit([{"name": "act", "arguments": {}}] * 10)
        assert session.results() == [(f"error: {error.__name__}: {error('no')}", True, 0.0)] * 10
        with pytest.raises(EnvironmentFault, match="act on task") if is_fault else contextlib.nullcontext():
            watch.check()


@pytest.mark.parametrize("done", [[1], {1}, {1: 1}, "yes"])
def test_done_of_a_class_that_was_written_for_trl_may_be_anything(done):
    class Listing:
        def reset(self, **_):
            self.done = done
            return "Go."
    session = Session(Watch(5.0), "listing", Listing, {})
    session.start()
    assert not session.done


class Ends(Shop):
    """A kept instance (it holds a connection) that never begins anew."""

    def sell(self, name: str) -> str:
        """Sell something.

        Args:
            name: what
        """
        self.done = True
        return "sold"


def test_an_instance_that_is_kept_has_to_begin_anew():
    with Watch(5.0) as watch:
        for _ in range(2):
            session = Session(watch, "ends", Ends, {})
            if _:
                with pytest.raises(EnvironmentFault, match=r"reset\(\) on task .* done is still True after it"):
                    session.start()
            else:
                session.start()
                session.submit([{"name": "sell", "arguments": {"name": "hat"}}])
                session.results()
                assert session.done
            del session
            gc.collect()


def test_a_signal_does_not_wait_for_a_slow_tool():
    """A run in whose tool a minute passed saved nothing before the minute was over; who stops it from outside waits for half of one."""
    class Sleeps(Shop):
        def sleep(self) -> str:
            """Sleep."""
            time.sleep(20)

    began = time.monotonic()
    signals = iter([None, None, None])

    def check():
        if next(signals, "SIGTERM"):
            raise Stop("stopped by SIGTERM", 143)
    session = Session(Watch(60.0, SimpleNamespace(kept={}, check=check)), "sleeps", Sleeps, {})
    session.start()
    session.submit([{"name": "sleep", "arguments": {}}])
    with pytest.raises(Stop):
        session.results()
    assert time.monotonic() - began < 15


# ------------------------------------------------------------------------------------- core's own
@pytest.mark.parametrize("name", ["equations", "gsm8k", "shop"])
def test_plain_and_isolated_sessions_give_the_same_episodes(monkeypatch, name):
    """Also faults that end an episode, and the scripted expert's turns: whatever is recorded is equal to the byte."""
    model, tokenizer = make_tiny()
    tasks = [{"question": "How many?", "answer": "72"}] if name == "gsm8k" else [{}] if name == "shop" else load_tasks(name, "train", 4, 0)
    if name == "shop":
        monkeypatch.setattr(Shop, "get_reward", lambda self: 1 / 0 if self.mine is Shop.threads[min(1, len(Shop.threads) - 1)] else float(self.touch()))
    episodes = []
    for sessions in (envs.session.sessions, isolate.sessions):
        monkeypatch.setattr(agent, "sessions", sessions)
        Shop.threads.clear()
        played = rollout(model, tokenizer, name, tasks, 3, limits=Limits(max_new_tokens=24, max_tokens=900), seed=5)
        assert {t.stop_reason == "error" for t in played} == ({True, False} if name == "shop" else {False})
        monkeypatch.setattr(schooling, "sessions", sessions)
        if name != "gsm8k":
            Shop.threads.clear()
            played += demonstrate(tokenizer, name, tasks)
        episodes.append([to_json(t.to_json()) for t in played])
    assert episodes[0] == episodes[1]


def test_a_plain_session_needs_no_thread_and_names_what_failed():
    before = threading.active_count()
    with envs.session.sessions(Limits()) as new_session:
        session = new_session("shop", Shop, {})
        session.start()
        assert sell(session, "nothing", "hat") == ["error: ValueError: nothing", "1"]
        assert session.reply("again") == ("Go on.", 0.0) and session.expert() == ("", [{"name": "sell", "arguments": {"name": "hat"}}])
        session.env.get_reward = None
        with pytest.raises(envs.session.EpisodeFault, match="get_reward.. on task .* raised TypeError"):
            session.score()
    # Threads of earlier tests may have ended meanwhile.
    assert threading.active_count() <= before and Shop.threads == [{threading.get_ident()}]


def test_ten_faults_in_a_row_end_a_run():
    run = SimpleNamespace(kept={}, check=lambda: None)
    for _ in range(2):
        with pytest.raises(EnvironmentFault, match="10 faults in a row.*reset.. on task .* raised ZeroDivisionError") if _ else contextlib.nullcontext():
            with isolate.sessions(Limits(), run) as new_session:
                for _ in range(5):
                    with pytest.raises(envs.session.EpisodeFault):
                        new_session("fails", type("Fails", (), {"reset": lambda self: 1 / 0}), {}).start()


def failing(monkeypatch, good, message="no such table"):
    """A class whose reset fails for all but every `good`-th episode."""
    class Server:
        count = 0

        def reset(self, **_):
            Server.count += 1
            if good and Server.count % good == 0:
                return "go"
            raise RuntimeError(message)
    return Server


def played(cls, episodes, run):
    """Begin so many episodes in a rollout; what the rollout raises is passed on."""
    with isolate.sessions(Limits(), run) as new_session:
        for _ in range(episodes):
            with contextlib.suppress(envs.session.EpisodeFault):
                new_session("server", cls, {}).start()


@pytest.mark.parametrize("good, ends", [(8, True), (4, True), (2, False), (3, False)])
def test_where_nearly_all_episodes_fail_the_run_ends_though_no_ten_do_in_a_row(monkeypatch, good, ends):
    """Of a server with one session each rollout of 8 got one episode, no group had two to compare, and a run that learned nothing ended with 0."""
    run, cls = SimpleNamespace(kept={}, check=lambda: None), failing(monkeypatch, good)
    played(cls, 8, run)  # too few to judge by
    with pytest.raises(EnvironmentFault, match=rf"{16 - 16 // good} of 16 episodes ended by a fault of their environment, and what is left teaches nothing; "
                       "the last: .*no such table$") if ends else contextlib.nullcontext():
        played(cls, 8, run)
    if ends:
        assert EnvironmentFault.code == 6
        played(failing(monkeypatch, 1), 8, run)  # a resumed run counts anew


@pytest.mark.parametrize("message, is_closed", [
    ("ConnectionClosedOK: received 1000 (OK)", True), ("sent 1011; connection was closed by the server", True), ("no session: capacity reached", True),
    ("ConnectionResetError: [Errno 104] Connection reset by peer", True), ("[Errno 32] BrokenPipeError", True), ("no such table", False), ("File closed", False)])
def test_a_server_with_a_single_session_is_named_where_connections_are_closed(monkeypatch, message, is_closed):
    for good in (8, None):
        run, cls = SimpleNamespace(kept={}, check=lambda: None), failing(monkeypatch, good, message)
        with pytest.raises(EnvironmentFault) as ended:
            played(cls, 16, run)
        assert ("a server that has a single session" in str(ended.value)) == ("max_concurrent_envs" in str(ended.value)) == is_closed
