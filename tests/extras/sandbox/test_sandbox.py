"""extras/sandbox/sandbox.py: what a model's code may do, what every attack comes to (as root and as an ordinary user), what a call costs and leaves."""
import ctypes
import glob
import json
import math
import multiprocessing
import os
import platform
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from statistics import median

import programs
import pytest

from extras.sandbox import sandbox, sandbox_child
from extras.sandbox.sandbox import CHILD, OUTPUT, run, same
from extras.sandbox.sandbox_child import READ_FILE, entries, is_standard, readable
from core.config import UserError

COLUMN = {"x86_64": 0, "aarch64": 1}.get(platform.machine())
try:
    run("pass")
except UserError as error:
    pytest.skip(str(error), allow_module_level=True)


def value(code, name="f", *arguments, **options):
    result = run(code, [(name, list(arguments))], **options)
    assert result.status == "ok", result
    return result.outcomes[0]


# ---------------------------------------------------------------------------------------------------------------- honest code
def test_values_come_back_as_json():
    code = "def f(*x): return x"
    for wanted in (None, True, 0, -1, 10**300, 0.1, -0.0, 1e16, math.inf, -math.inf, "", "a\"\\\n\0é😀\ud800", [], [1, [2.5, "x"]], (1, (2,)), {1, "a"}, frozenset({2}),
                   {"a": {1: [True]}, (1, 2): None}, {}, set()):
        got = value(code, "f", wanted)["value"][0]
        assert same(got, wanted), (got, wanted)
    assert math.isnan(value("def f(): return float('nan')")["value"])


def test_code_and_calls():
    result = run("import math\nprint('loaded')\ndef area(r):\n    print('called')\n    return math.pi * r ** 2\nstate = []\ndef bad(x):\n    state.append(x)\n    return len(state) / x",
                 [("area", [1]), ("bad", [0]), ("bad", [1]), ("none", [])])
    assert result.status == "ok" and result.output == "loaded\ncalled\n" and result.error == ""
    assert same(result.outcomes[0]["value"], math.pi) and result.outcomes[2]["value"] == 2.0  # one process: state stays
    assert result.outcomes[1] == {"error": "line 9: ZeroDivisionError: division by zero"}
    assert "no attribute 'none'" in result.outcomes[3]["error"]
    assert run("").status == "ok" and run("x = 1\n\nraise KeyError('k')").error == "line 3: KeyError: 'k'"
    assert run("def f(:\n  pass").error.startswith("line 1: SyntaxError: ") and run("import sys\nsys.exit(3)").error == "line 2: SystemExit: 3"
    assert run("@dataclass\nclass A: pass").error == "line 1: NameError: name 'dataclass' is not defined"
    assert run("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int' = 1\nprint(A())\nif __name__ == '__main__': print('main')").output == "A(x=1)\nmain\n"


def test_the_standard_library_works():
    """All of it that computes; time, random, locks, and what numbers of the machine it asks for."""
    names = """abc array ast base64 bisect builtins calendar cmath codecs collections contextlib copy csv ctypes dataclasses datetime decimal difflib enum fractions
        functools graphlib hashlib heapq html inspect io itertools json keyword locale logging math numbers operator os pathlib pickle platform pprint queue random re
        sched secrets shlex sqlite3 ssl statistics string struct textwrap threading time timeit token tokenize traceback types typing unicodedata unittest uuid
        warnings weakref xml.etree.ElementTree zlib zoneinfo"""
    code = f"for name in {names.split()!r}:\n    __import__(name)\n" + """
import datetime, decimal, hashlib, os, platform, random, sqlite3, threading, time, uuid
time.sleep(0.001); time.time(); time.perf_counter(); datetime.datetime.now(); random.seed(3); random.random(); os.urandom(4); uuid.uuid4(); hashlib.sha256(b"x").hexdigest()
with threading.Lock(): pass
assert os.cpu_count() and os.getpid() and os.getcwd() == "/" and platform.machine()
sqlite3.connect(":memory:").execute("select 1").fetchone()
exec("import functools; functools.lru_cache")
big = [0] * 10**6
"""
    result = run(code)
    assert result.status == "ok", (result.error, result.output)


def test_the_same_every_time():
    code = "import random\nprint({'a', 'b', 'c', 'd', 'e'}, hash('x'), object())\ndef f(n):\n    t = 0\n    for i in range(n):\n        t += i\n    return sum(i for i in range(t) if i % 2)"
    results = [run(code, [("f", [4]), ("f", [9])], count=True) for _ in range(2)]
    assert results[0] == results[1] and "object at 0x...>" in results[0].output
    first, second = (outcome["operations"] for outcome in results[0].outcomes)
    assert 10 < first < second / 2
    assert value("def f():\n    return 1", count=True) == {"value": 1, "operations": 1, "text": "1"} and value("def f(): return 1")["operations"] == 0


def test_the_environment_is_empty(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    names = value("import os\ndef f(): return sorted(os.environ)")["value"]
    assert "PYTHONHASHSEED" in names and set(names) <= {"PYTHONHASHSEED", "LC_CTYPE", "LD_LIBRARY_PATH"}


def test_equal_values():
    class Always(int):
        def __eq__(self, other):
            return True

    for got, wanted in [(1, 1), ([1, [2]], (1, (2,))), (2, 2.0), (2.0, 2), ([6.0], [6]), (0.1 + 0.2, 0.3), ({"set": [2, 1]}, {1, 2}), ({"dict": [["a", 1], ["b", [2]]]}, {"b": (2,), "a": 1}), (math.inf, math.inf)]:
        assert same(got, wanted), (got, wanted)
    for got, wanted in [(True, 1), (1, True), (1, 1.1), (2.5, 2), (2.0000001, 2), (1.0, True), (1e17, 10**17 + 1), (math.inf, 2), ("1", 1), (None, 0), (None, False), ([1], [1, 1]), ([], None), (math.nan, math.nan), (10**400, 1.0), (-math.inf, math.inf),
                        ({"set": [1, 1]}, {1, 2}), ({"set": 3}, {1}), ([1, 2], {1, 2}), ({"dict": [["a", 1]]}, {"a": 2}), ({"dict": [[1]]}, {1: 2}), ({"a": 1}, {"a": 1}), (Always(3), 4)]:
        assert not same(got, wanted), (got, wanted)


# -------------------------------------------------------------------------------------------------------------------- attacks
class Scene:
    """What an attacker of some user looks for: a secret, a process to kill, and who listens."""

    def __init__(self, user):
        self.user = user
        self.folder = tempfile.mkdtemp()
        os.chmod(self.folder, 0o777)
        self.secret = os.path.join(self.folder, "id_rsa")
        Path(self.secret).write_text("TOPSECRET")
        os.chmod(self.secret, 0o666)
        shutil.copy(CHILD, self.folder)
        identity = {"user": 65534, "group": 65534} if user == "nobody" else {}
        self.bystander = subprocess.Popen(["sleep", "1000"], **identity)
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.abstract = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.abstract.bind(f"\0sandbox-test-{self.folder}")
        for listener in (self.tcp, self.udp, self.abstract):
            listener.setblocking(False)
        self.places = {"SECRET": repr(self.secret), "FOLDER": repr(self.folder), "BYSTANDER": str(self.bystander.pid), "TCP": str(self.tcp.getsockname()[1]),
                       "UDP": str(self.udp.getsockname()[1]), "ABSTRACT": repr(self.abstract.getsockname().decode()), "OUTPUT": str(OUTPUT)}
        if user == "nobody":
            self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("fork"), become_nobody, (self.folder,))
            self.play = lambda *arguments: self.pool.submit(play, *arguments).result(30)
        else:
            self.play = play

    def attack(self, code, seconds=5.0):
        for name, place in self.places.items():
            code = re.sub(rf"\b{name}\b", lambda _: place, code)
        return self.play(PRELUDE + code, seconds)

    def untouched(self):
        """Whether all is as it was: the secret, the folder, the bystander, and nobody was called."""
        assert Path(self.secret).read_text() == "TOPSECRET" and os.stat(self.secret).st_mode & 0o777 == 0o666
        assert sorted(os.listdir(self.folder)) == ["id_rsa", "sandbox_child.py"]
        assert self.bystander.poll() is None and os.getpriority(os.PRIO_PROCESS, self.bystander.pid) == os.getpriority(os.PRIO_PROCESS, 0)
        with pytest.raises(BlockingIOError):
            self.tcp.accept()
        for listener in (self.udp, self.abstract):
            with pytest.raises(BlockingIOError):
                listener.recv(1)
        return True

    def close(self):
        self.bystander.kill()
        self.bystander.wait()
        for listener in (self.tcp, self.udp, self.abstract):
            listener.close()
        if self.user == "nobody":
            self.pool.shutdown()
        shutil.rmtree(self.folder)


def become_nobody(folder):
    """In a forked process: uid 65534, and a Python that it can start."""
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    sandbox.COMMAND = [PYTHON, *sandbox.COMMAND[1:-1], os.path.join(folder, "sandbox_child.py")]


def play(code, seconds):
    return run(re.sub(r"\bPARENT\b", str(os.getpid()), code), [("attack", [])], seconds=seconds)


# A Python that others than root may start: not one under /root.
PYTHON = next((path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(path)), None)
USERS = ["me"] if os.getuid() or not PYTHON else ["root", "nobody"]


@pytest.fixture(scope="module", params=USERS)
def scene(request):
    scene = Scene(request.param)
    yield scene
    scene.close()


# An attack is the body of a function. It returns what it got; an exception is what it should meet.
PRELUDE = f"""
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def syscall(*numbers_and_arguments):
    number, *arguments = numbers_and_arguments
    number = number[{COLUMN}] if type(number) is tuple else number
    got = libc.syscall(*[ctypes.c_long(x) if type(x) is int else x for x in (number, *arguments)])
    if got < 0:
        raise PermissionError(errno.errorcode[ctypes.get_errno()])
    return got
"""
DENIED = "PermissionError|EPERM|ENOSYS|EACCES"

ATTACKS = {
    # ---- time and memory
    "loop": ("while True: pass", "timeout"),
    "power in C": ("9**9**9", "timeout"),
    "signals ignored": ("import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass", "timeout"),
    "sleep": ("import time\ntime.sleep(100)", "timeout"),
    "16 MiB blocks": ("x = []\nwhile True: x.append(bytearray(1 << 24))", "MemoryError"),
    "64 GiB": ("return len(bytearray(1 << 36))", "MemoryError"),
    "huge mmap": ("import mmap\nreturn len(mmap.mmap(-1, 1 << 34))", "Cannot allocate|OSError"),
    "recursion": ("def f(): return f()\nreturn f()", "RecursionError"),
    "recursion without limit": ("sys.setrecursionlimit(10**9)\ndef f(): return f()\nreturn f()", "crash|timeout|MemoryError"),
    "recursion limit of nothing": ("sys.setrecursionlimit(5)", "crash|Recursion|null"),
    "regex": ("import re\nreturn bool(re.match('(a+)+$', 'a' * 50 + 'b'))", "timeout"),
    # ---- output
    "endless print": ("while True: print('x' * 1000)", "File too large"),
    "endless print, caught": ("while True:\n    try: print('x' * 1000)\n    except OSError: pass", "timeout"),
    "raw writes": ("while True:\n    for fd in range(1, 10):\n        try: os.write(fd, b'x' * 4096)\n        except OSError: pass", "timeout|crash|more than"),
    "sparse file": ("os.lseek(1, 1 << 40, 0)\nos.write(1, b'x')", "File too large"),
    "huge value": ("return 'x' * 10**5", "more than"),
    "garbage as a report": ("for fd in range(3, 10):\n    try: os.write(fd, b'\\xff\\x00garbage\\n[1]\\nnull\\n')\n    except OSError: pass\nos._exit(0)", "crash"),
    "deep report": ("for fd in range(3, 10):\n    try: os.write(fd, b'[' * 30000 + b'\\n')\n    except OSError: pass\nos._exit(0)", "crash"),
    "report closed": ("os.closerange(3, 64)\nwhile True: pass", "crash|timeout"),
    "fds swapped": ("os.dup2(1, 3); os.dup2(1, 4); os.dup2(1, 5)\nfor fd in range(6, 64):\n    try: os.dup2(1, fd)\n    except OSError: pass\nreturn 'x'", "crash|timeout"),
    "stdout removed": ("os.close(1); os.close(2); sys.stdout = None\nreturn 'alive'", "alive"),
    "report left unread": ("import fcntl\nfcntl.fcntl(1, fcntl.F_SETFL, os.O_DIRECT | os.O_NONBLOCK | os.O_ASYNC)", DENIED),
    "surrogate printed": ("print('\\ud800')", "UnicodeEncodeError"),
    # ---- files
    "read a secret": ("return open(SECRET).read()", DENIED),
    "read it by os.open": ("return os.read(os.open(SECRET, os.O_RDONLY), 10)", DENIED),
    "read it by openat2": ("return syscall(437, -100, SECRET.encode(), bytes(24), 24)", DENIED),
    "read it by /proc/self/root": ("return open('/proc/self/root' + SECRET).read()", DENIED),
    "read it by path traversal": ("return open(os.path.dirname(os.__file__) + '/../../../../../../../..' + SECRET).read()", DENIED),
    "execute-only open, then a link of it": ("fd = os.open(SECRET, os.O_PATH)\nreturn open(f'/proc/self/fd/{fd}').read()", DENIED + "|null|FileNotFound"),
    "list a folder": ("return os.listdir(FOLDER)", DENIED),
    "list /": ("return os.listdir('/')", DENIED),
    "list /proc": ("return os.listdir('/proc')", DENIED),
    "environment of the parent": ("return open('/proc/PARENT/environ', 'rb').read().hex()", DENIED),
    "command line of the parent": ("return open('/proc/PARENT/cmdline').read()", DENIED),
    "memory of the parent": ("return open('/proc/PARENT/mem', 'rb').read(1).hex()", DENIED),
    "descriptors of the parent": ("return os.listdir('/proc/PARENT/fd')", DENIED),
    "a descriptor of the parent by its link": ("return os.readlink('/proc/PARENT/fd/0')", DENIED),
    "own environment": ("return open('/proc/self/environ').read()", DENIED),
    "the code of the sandbox": ("return open(" + repr(str(CHILD)) + ").read()", DENIED),
    "write /dev/shm": ("open('/dev/shm/sandbox-test', 'w').write('x')", DENIED),
    "write /tmp": ("open('/tmp/sandbox-test', 'w').write('x')", DENIED),
    "write into the folder": ("open(FOLDER + '/new', 'w').write('x')", DENIED),
    "a nameless file": ("os.open(FOLDER, os.O_TMPFILE | os.O_RDWR)", DENIED),
    "truncate by open": ("os.open(SECRET, os.O_WRONLY | os.O_TRUNC)", DENIED),
    "truncate": ("os.truncate(SECRET, 0)", DENIED),
    "append": ("open(SECRET, 'a').write('x')", DENIED),
    "256 MB in the working folder": ("open('big', 'wb').write(bytes(1 << 28))", DENIED),
    "symlink": ("os.symlink(SECRET, FOLDER + '/link')\nreturn open(FOLDER + '/link').read()", DENIED),
    "hard link": ("os.link(SECRET, FOLDER + '/link')", DENIED),
    "rename": ("os.rename(SECRET, FOLDER + '/other')", DENIED),
    "unlink by ctypes": ("return libc.unlink(SECRET.encode())", '"value": -1'),
    "mkdir": ("os.mkdir(FOLDER + '/new')", DENIED),
    "fifo": ("os.mkfifo(FOLDER + '/new')", DENIED),
    "device": ("os.mknod(FOLDER + '/new', 0o20666, os.makedev(1, 1))", DENIED),
    "chmod": ("os.chmod(SECRET, 0)", DENIED),
    "chown": ("os.chown(SECRET, 1, 1)", DENIED),
    "times": ("os.utime(SECRET, (0, 0))", DENIED),
    "extended attributes": ("os.setxattr(SECRET, 'user.x', b'x')", DENIED),
    "chmod of an open library": ("os.fchmod(os.open(os.__file__, os.O_RDONLY), 0)", DENIED),
    "attributes of an open library": ("import fcntl, array\nfcntl.ioctl(os.open(os.__file__, os.O_RDONLY), 0x40086602, array.array('l', [0x40]))", DENIED),
    "lock of an open library": ("import fcntl\nfcntl.flock(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_EX)", DENIED),
    "lease of an open library": ("import fcntl\nfcntl.fcntl(os.open(os.__file__, os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK)", DENIED),
    "write into the library": ("open(os.path.dirname(os.__file__) + '/evil.py', 'w').write('x')", DENIED + "|Read-only"),
    "terminal input": ("import fcntl\nfor c in b'id\\n': fcntl.ioctl(0, 0x5412, bytes([c]))", DENIED),
    "devices": ("got = []\nfor name in ('mem', 'kmsg', 'ptmx', 'tty', 'sda', 'fuse', 'kvm', 'net/tun', 'random', 'zero'):\n    try: got.append(open('/dev/' + name))\n"
                "    except OSError: pass\nreturn len(got)", '"value": 0'),
    "handles of files": ("return syscall((303, 264), -100, SECRET.encode(), bytes(200), ctypes.byref(ctypes.c_int()), 0)", DENIED),
    "open by a handle": ("return syscall((304, 265), 0, bytes(200), 0)", DENIED),
    "watch files": ("return syscall((294, 26), 0)", DENIED),
    "fanotify": ("return syscall((300, 262), 0, 0)", DENIED),
    "mount": ("return libc.mount(b'none', b'/mnt', b'tmpfs', 0, 0)", '"value": -1'),
    "the new mount API": ("for n in (428, 429, 430, 431, 432, 433, 442):\n    try: return syscall(n, 0, 0, 0)\n    except PermissionError: pass", "null"),
    "chroot": ("os.chroot(FOLDER)", DENIED),
    # ---- the network
    "TCP": ("import socket\nsocket.create_connection(('127.0.0.1', TCP)).send(b'x')", DENIED),
    "UDP": ("import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', UDP))", DENIED),
    "abstract socket": ("import socket\nsocket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', ABSTRACT)", DENIED),
    "abstract socket from a pair": ("import socket\nsocket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', ABSTRACT)", DENIED),
    "names": ("import socket\nreturn socket.gethostbyname('example.org')", "gaierror|" + DENIED),
    "netlink, raw, packet, vsock": ("import socket\nfor f, k in ((16, 3), (2, 3), (17, 3), (40, 1), (38, 5)):\n    try: return socket.socket(f, k).fileno()\n    except PermissionError: pass", "null"),
    # ---- other processes
    "signal the parent": ("os.kill(PARENT, 9)", DENIED),
    "signal by ctypes": ("return libc.kill(BYSTANDER, 9)", '"value": -1'),
    "signal the group, and all": ("return [libc.kill(0, 9), libc.kill(-1, 9), libc.killpg(0, 9)]", r'\[-1, -1, -1\]'),
    "signal by tgkill": ("return syscall((234, 131), BYSTANDER, BYSTANDER, 9)", DENIED),
    "signal by sigqueue": ("return syscall((129, 138), BYSTANDER, 9, bytes(128))", DENIED),
    "signal by a pidfd": ("return syscall(434, BYSTANDER, 0)", DENIED),
    "signal by the owner of a file": ("import fcntl\nfcntl.fcntl(1, fcntl.F_SETOWN, BYSTANDER)", DENIED),
    "SIGKILL to itself": ("os.kill(os.getpid(), 9)", DENIED),
    "abort": ("os.abort()", "crash"),
    "fork": ("return os.fork()", DENIED),
    "fork by ctypes": ("return libc.fork()", '"value": -1'),
    "vfork": ("return syscall((58, 220), 0, 0, 0, 0, 0)", DENIED),
    "clone3": ("return syscall(435, bytes(88), 88)", DENIED),
    "daemon": ("if os.fork() == 0:\n    os.setsid()\n    import time; time.sleep(1000)", DENIED),
    "a thread": ("import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()", "can't start new thread"),
    "subprocess": ("import subprocess\nreturn subprocess.run(['id'], capture_output=True).returncode", DENIED),
    "os.system": ("return os.system('id')", r'"value": (-1|32512|256|127)'),
    "exec": ("os.execv('/usr/bin/id', ['id'])", DENIED),
    "execveat": ("return syscall((322, 281), -100, b'/usr/bin/id', 0, 0, 0)", DENIED),
    "posix_spawn": ("return os.posix_spawn('/usr/bin/id', ['id'], {})", DENIED),
    "multiprocessing": ("import multiprocessing\nmultiprocessing.get_context('fork').Process(target=print).start()", DENIED),
    "ptrace": ("return libc.ptrace(16, BYSTANDER, 0, 0)", '"value": -1'),
    "memory of another": ("return syscall((310, 270), BYSTANDER, 0, 0, 0, 0, 0)", DENIED),
    "write memory of another": ("return syscall((311, 271), BYSTANDER, 0, 0, 0, 0, 0)", DENIED),
    "a descriptor of another": ("return syscall(438, 3, 0, 0)", DENIED),
    "compare with another": ("return syscall((312, 272), PARENT, os.getpid(), 0, 0, 0)", DENIED),
    "priority of another": ("os.setpriority(os.PRIO_PROCESS, BYSTANDER, 19)", DENIED),
    "own priority": ("os.nice(-5)", DENIED),
    "real-time scheduling": ("os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))", DENIED),
    "limits up": ("import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))", "ValueError|" + DENIED),
    "limits of another": ("return syscall((302, 261), BYSTANDER, 7, bytes(16), 0)", DENIED),
    "own name space": ("return libc.unshare(0x10000000)", '"value": -1'),
    "another name space": ("return syscall((308, 268), 0, 0)", DENIED),
    "another user": ("os.setuid(1)", DENIED),
    "capabilities back": ("return syscall((126, 91), (0x20080522).to_bytes(8, 'little'), b'\\xff' * 24)", DENIED),
    # ---- the kernel
    "reboot": ("return syscall((169, 142), 0, 0, 0, 0)", DENIED),
    "a module": ("return syscall((175, 105), 0, 0, b'')", DENIED),
    "bpf": ("return syscall((321, 280), 0, bytes(120), 120)", DENIED),
    "perf": ("return syscall((298, 241), bytes(120), 0, -1, -1, 0)", DENIED),
    "io_uring": ("return syscall(425, 8, bytes(120))", DENIED),
    "userfaultfd": ("return syscall((323, 282), 0)", DENIED),
    "memfd": ("return os.memfd_create('x')", DENIED),
    "keys": ("return syscall((250, 219), 0, -3, 1)", DENIED),
    "add a key": ("return syscall((248, 217), b'user', b'x', b'y', 1, -3)", DENIED),
    "shared memory of System V": ("return syscall((29, 194), 0, 4096, 0o1777)", DENIED),
    "message queues": ("return [syscall((68, 186), 0, 0o1777)]", DENIED),
    "POSIX queues": ("return syscall((240, 180), b'sandbox', 0o102, 0o600, 0)", DENIED),
    "semaphores": ("import multiprocessing\nmultiprocessing.get_context('fork').Semaphore(1)", DENIED),
    "timers": ("import signal\nsignal.setitimer(signal.ITIMER_REAL, 1)", "itimer_error.*not permitted"),
    "another filter": ("return libc.prctl(22, 2, bytes(16), 0, 0)", '"value": -1'),
    "the end with the parent": ("return libc.prctl(1, 0)", '"value": -1'),
    "the clock": ("import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)", DENIED),
    "the name of the machine": ("import socket\nsocket.sethostname('x')", DENIED),
    "the kernel's log": ("return syscall((103, 116), 3, bytes(100), 100)", DENIED),
    # ---- the grader
    "input": ("return input()", "EOFError"),
    "standard input again": ("os.lseek(0, 0, 0)\nreturn sys.stdin.read()", r'"value": ""|Illegal seek|OSError'),
    "numpy of the trainer": ("import numpy", "ModuleNotFoundError"),
    "torch by its path": ("sys.path += PATHS\nimport torch", "ModuleNotFoundError|ImportError|PermissionError"),
    "exit": ("sys.exit(0)", "SystemExit"),
    "exit at once": ("os._exit(0)", "crash"),
    "exit while loading": ("import atexit\natexit.register(lambda: print('late'))\nraise SystemExit", "SystemExit"),
    "builtins patched": ("import builtins\nbuiltins.len = builtins.type = builtins.repr = builtins.str = lambda *a: 1\nreturn 2", "crash|error|value"),
    "modules emptied": ("sys.modules.clear()\nreturn 2", '"value": 2'),
    "os replaced": ("os.write = lambda *a: 0\nreturn 2", "crash"),
    "NaN": ("return float('nan')", "NaN"),
    "900 lists": ("x = []\nfor _ in range(900): x = [x]\nreturn x", "not a plain value"),
    "a list in itself": ("x = []\nx.append(x)\nreturn x", "not a plain value"),
    "4,301 digits": ("return 10**4300", "ValueError"),
    "a generator": ("return (i for i in range(3))", "generator is not a plain value"),
    "an object": ("return object()", "object is not a plain value"),
    "always equal": ("class A:\n    def __eq__(self, other): return True\nreturn A()", "A is not a plain value"),
    "an int that is always equal": ("class A(int):\n    def __eq__(self, other): return True\n    def __repr__(self): return '4'\nreturn A(3)", '"value": 3'),  # compared as 3, outside
    "an exception that cannot be shown": ("class A(Exception):\n    def __str__(self): raise A\nraise A", "crash|error"),
    "an exception of long text": ("raise ValueError('x' * 10**6)", "ValueError: xxx"),
    "a value after the report": ("class A:\n    def __del__(self): print('late')\nglobal a\na = A()\nreturn 1", '"value": 1'),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attack(scene, name):
    body, wanted = ATTACKS[name]
    body = body.replace("PATHS", repr([p for p in sys.path if "site-packages" in p]))
    code = "def attack():\n" + "".join(f"    {line}\n" for line in body.split("\n"))
    is_endless = wanted.startswith("timeout")
    began = time.monotonic()
    result = scene.attack(code, 0.4 if is_endless else 2.0 if "timeout" in wanted else 20.0)
    seconds = time.monotonic() - began
    shown = f"{result.status} {result.error} {json.dumps(result.outcomes)}"
    assert re.search(wanted, shown), shown
    assert "TOPSECRET" not in shown + result.output and len(result.output) <= OUTPUT
    assert scene.untouched() and not os.path.exists("/dev/shm/sandbox-test") and not os.path.exists("/tmp/sandbox-test")
    if is_endless:
        assert seconds < 0.4 + 0.3 + LOAD


LOAD = 2.0  # what other work on the machine may add


def test_no_installed_package_is_read(scene, tmp_path):
    """Where this project is installed, the solutions of its tasks lie there. The standard library beside them is read."""
    import site
    library = Path(os.__file__).parent
    folders = {Path(folder) for folder in (*site.getsitepackages(), *glob.glob(f"{sys.base_prefix}/lib*/python3*/*-packages"), *glob.glob("/usr/lib*/python3*/*-packages"), *glob.glob("/usr/local/lib*/python3*/*-packages"))}
    files = [str(file) for folder in folders for file in sorted(folder.glob("*/*.py"))[:2] + sorted(folder.glob("*.py"))[:2]]
    assert any(file.startswith(sys.base_prefix) for file in files), "pip, at least"
    body = "got = []\nfor name in NAMES:\n    try:\n        got.append(open(name).read(1))\n    except PermissionError:\n        pass\nreturn got".replace("NAMES", repr(files))
    read = scene.attack("def attack():\n" + "".join(f"    {line}\n" for line in body.split("\n")))
    assert read.outcomes[0]["value"] == []
    allowed = [path for path, access in readable().items() if access & READ_FILE]
    assert not [path for path in allowed for file in files if Path(file).resolve().is_relative_to(Path(path).resolve())]
    assert {str(library / name) for name in ("os.py", "json", "lib-dynload")} <= set(allowed)
    (tmp_path / "site-packages").mkdir()
    for name in ("json.py", "mine.py", "mine.cpython-311.so", "_sysconfigdata_x.py"):
        (tmp_path / name).touch()
    (tmp_path / "json2").symlink_to("nowhere")
    assert {os.path.basename(path) for path in entries(str(tmp_path), is_standard)} == {"json.py", "_sysconfigdata_x.py"} and entries("nowhere", is_standard) == {}


@pytest.mark.parametrize("user", USERS)
def test_what_may_be_read_is_not_emptied(user, monkeypatch):
    """Opened to be read and truncated: a user's own library, as a conda or pyenv has it, lost its contents by that."""
    scene = Scene(user)
    child = os.path.join(scene.folder, "sandbox_child.py")
    text = CHILD.read_text()
    assert "    return paths" in text
    Path(child).write_text(text.replace("    return paths", f"    return paths | {{{scene.folder!r}: READ}}"))
    if user != "nobody":
        monkeypatch.setattr(sandbox, "COMMAND", [*sandbox.COMMAND[:-1], child])
    for way in ("os.open(SECRET, os.O_RDONLY | os.O_TRUNC)", "syscall((257, 56), -100, SECRET.encode(), os.O_TRUNC | os.O_CLOEXEC)",
                "syscall(2, SECRET.encode(), os.O_TRUNC)" if COLUMN == 0 else "syscall(56, -100, SECRET.encode(), os.O_TRUNC, 0)"):
        result = scene.attack(f"def attack():\n    return len(open(SECRET).read()), {way}\n")
        assert re.search(DENIED, str(result.outcomes)) and scene.untouched(), (way, result)
    assert scene.attack("def attack(): return len(open(SECRET).read())\n").outcomes[0]["value"] == 9
    scene.close()


# On x86_64 return addresses of the kernel's probes, which kill whoever calls them.
PROBES = {335, 336}


def test_no_other_system_call_gets_through(scene):
    """All numbers, with arguments of 0: only those of the list are answered by the kernel."""
    allowed = set(sandbox_child.numbers(COLUMN))
    code = f"""
def attack():
    through = []
    for number in range(600):
        if number not in {allowed | PROBES}:
            try: through.append([number, syscall(number, 0, 0, 0, 0, 0, 0)])
            except PermissionError as error:
                if str(error) not in ("EPERM", "ENOSYS"): through.append([number, str(error)])
    return through
"""
    assert scene.attack(code).outcomes[0]["value"] == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="tables of x86_64")
@pytest.mark.parametrize("body", ["return syscall(0x40000000 + 39)",  # getpid of the x32 table
                                  # mov eax, 20; int 0x80; ret: getpid of the 32-bit table
                                  "import mmap\n    m = mmap.mmap(-1, 4096, prot=7)\n    m.write(bytes.fromhex('b814000000cd80c3'))\n"
                                  "    return ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()"])
def test_other_tables_of_system_calls_kill(scene, body):
    result = scene.attack(f"def attack():\n    {body}\n")
    assert result.status == "crash" and f"status {-signal.SIGSYS}" in result.error, result


def test_the_numbers_are_those_of_the_kernel():
    """The columns against the headers, where they are installed: asm-generic is what aarch64 uses."""
    headers = [next((path for path in paths if os.path.exists(path)), None) for paths in (
        ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"), ("/usr/include/asm-generic/unistd.h",))]
    if None in headers:
        pytest.skip("no headers of the kernel")
    words = sandbox_child.SYSCALLS.split()
    rows = [row for row in zip(words, words[1:], words[2:]) if all(re.fullmatch(r"\d+|-", number) for number in row[1:])]
    assert len(rows) == len(set(rows)) == len(sandbox_child.numbers(0)) > 60
    for column, header in enumerate(headers):
        known = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text()))
        known = {{"fstatat": "newfstatat"}.get(name, name): number for name, number in known.items()}
        for name, *pair in rows:
            assert pair[column] == known.get(name, "-"), (name, pair[column], known.get(name))


def test_code_of_any_kind():
    for code, says in [("x" * 200_000, "NameError"), ("x = 1\n" * 40_000, ""), ("a\0b", "null"), ("(" * 5000, "SyntaxError"), ("x = '\ud800'", "Unicode"),
                       ("-" * 100_000 + "1", "Error"), ("[" * 90 + "]" * 90, ""), ("\t if", "Error"), ("é = 1\nprint(é)", "")]:
        result = run(code)
        assert (result.status == "ok") == (not says) and says in result.error, (code[:20], result)


def test_a_forged_report_is_only_values():
    """Whoever writes to the report chooses values, no more: lines that are no JSON end it, and there is one for each call."""
    forge = "import os, stat\nfd = next(fd for fd in range(3, 9) if stat.S_ISFIFO(os.fstat(fd).st_mode))\n"
    calls = [("f", [])] * 3
    lines = [{"error": None}, {"value": "ALL_TESTS_PASSED", "operations": "few"}, {"value": {"set": 7}}, {"confined": False}, {"value": 4}]
    code = forge + f"for line in {[json.dumps(line) for line in lines]!r}: os.write(fd, line.encode() + b'\\n')\nos._exit(0)"
    result = run(code, calls)
    assert result.status in ("ok", "error") and len(result.outcomes) <= 3
    for text in (b"\xff\xfe\n", b"[1]\n", b"{\n", b"1" * 5000 + b"\n", b"[" * 50_000 + b"\n", b'{"value": ' + b"1" * 5000 + b"}\n", b"\n" * 1000, b'{"value": 1}'):
        result = run(forge + f"os.write(fd, {text!r})\nos._exit(0)", calls)
        assert result.status == "crash" and result.outcomes == [], (text[:10], result)


# ----------------------------------------------------------------------------------------------------------- costs and leavings
def cpu_of(function):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    function()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_a_trivial_call_costs_little_more_than_starting_python():
    """20 ms of CPU on most machines, and more on a slow one: so it is compared with an empty program."""
    costs = [cpu_of(lambda: run("def f(x): return x + 1", [("f", [1])])) for _ in range(20)]
    empty = [cpu_of(lambda: subprocess.run([sys.executable, "-I", "-S", "-c", "pass"])) for _ in range(20)]
    assert median(costs) <= 3 * median(empty), (costs, empty)  # it is 2.1; a package that the child imports would be far more


def test_killed_in_time():
    for code in ("while True: pass", "import time; time.sleep(99)"):
        late = []
        for _ in range(5):
            began = time.monotonic()
            assert run(code, seconds=0.2).status == "timeout"
            late.append(time.monotonic() - began - 0.2)
        assert min(late) < 0.3, late


def test_120_hostile_calls_leave_nothing():
    """No descriptors, temporary files, threads, processes or memory."""
    names = ["fork", "endless print", "read a secret", "exit at once", "always equal", "huge value", "report closed", "64 GiB", "subprocess", "abort", "garbage as a report", "loop"]
    codes = ["def attack():\n" + "".join(f"    {line}\n" for line in ATTACKS[name][0].split("\n")) for name in names] + ["(((", "print('fine')", "import os\nos._exit(7)"]

    def counts():
        processes = [p for p in os.listdir("/proc") if p.isdigit() and child_of(p)]
        return len(os.listdir("/proc/self/fd")), len(processes), threading.active_count(), sorted(os.listdir(folder))

    def child_of(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1] == str(os.getpid())
        except OSError:
            return False

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(4) as pool:
        tempfile.tempdir, before = folder, tempfile.tempdir
        try:
            def hostile(i):
                return run(PRELUDE + codes[i % len(codes)].replace("SECRET", "'/etc/shadow'"), [("attack", [])], seconds=0.3).status
            list(pool.map(hostile, range(15)))
            began, memory = counts(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            statuses = set(pool.map(hostile, range(120)))
            assert statuses >= {"ok", "error", "timeout", "crash"} and counts() == began
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 20_000  # KiB
        finally:
            tempfile.tempdir = before


def test_the_child_dies_with_its_parent(tmp_path):
    code = f"""
import sys, threading, time
sys.path.insert(0, {str(CHILD.parents[2])!r})
from extras.sandbox import sandbox
import subprocess
real = subprocess.Popen
def popen(*a, **k):
    child = real(*a, **k)
    print(child.pid, flush=True)
    return child
subprocess.Popen = popen
sandbox.run("while True: pass", seconds=100)
"""
    parent = programs.Program("-c", code)
    while not parent.said("stdout").endswith("\n"):
        assert parent.poll() is None, parent.said("stderr")
        time.sleep(0.02)
    child = int(parent.said("stdout"))
    time.sleep(0.3)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{child}") and "Z" not in Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1][:3] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert time.monotonic() < deadline


def test_where_memory_ends_the_child_is_killed_and_not_the_trainer():
    """64 episodes of list(range(10**7)) hold 28 GB, and of all processes the kernel killed the largest: the run."""
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(run, "while True: pass", seconds=2)
        deadline, seen = time.monotonic() + 10, set()
        while "1000" not in seen and not call.done() and time.monotonic() < deadline:
            for children in Path("/proc/self/task").glob("*/children"):
                seen.update(Path(f"/proc/{child}/oom_score_adj").read_text().strip() for child in children.read_text().split())
        assert "1000" in seen and call.result().status == "timeout"


# ------------------------------------------------------------------------------------------------- where it cannot be confined
@pytest.mark.parametrize("change, says", [
    ("libc.syscall(444,", r"Landlock: Function not implemented"), ("libc.prctl(22, 2,", "seccomp"), ("machine = os.uname().machine", "aarch64, but linux on riscv64")])
def test_refused_where_it_cannot_be_confined(monkeypatch, tmp_path, change, says):
    """Nothing of the code runs, the message names three ways out, and one of them runs it."""
    text = CHILD.read_text()
    assert change in text
    broken = {"libc.syscall(444,": "libc.syscall(9999,", "libc.prctl(22, 2,": "libc.prctl(22, 77,"}.get(change, "machine = 'riscv64'")
    (tmp_path / "child.py").write_text(text.replace(change, broken))
    monkeypatch.setattr(sandbox, "COMMAND", [*sandbox.COMMAND[:-1], str(tmp_path / "child.py")])
    with pytest.raises(UserError, match=says) as error:
        run(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert all(way in str(error.value) for way in ("Linux 5.13", "--env code", "--unsafe_code")) and "\n" not in str(error.value)
    assert not (tmp_path / "ran").exists()
    assert run(f"open({str(tmp_path / 'ran')!r}, 'w')\nprint('ran')", unsafe=True).output == "ran\n" and (tmp_path / "ran").exists()


def test_where_no_temporary_file_can_be_made(monkeypatch, tmp_path):
    """A read-only container: a line, where once was a traceback."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(UserError, match="^the sandbox did not start: .*No such file"):
        run("pass")


def test_where_a_group_that_has_ended_cannot_be_killed(monkeypatch):
    """macOS answers EPERM where Linux kills a zombie: that once was "the sandbox did not start", with --unsafe_code too."""
    def killpg(pid, signum):
        time.sleep(0.2)
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            raise PermissionError(1, "Operation not permitted")
        kill(pid, signum)
    kill = os.killpg
    monkeypatch.setattr(os, "killpg", killpg)
    assert run("print(1)", unsafe=True).output == "1\n"
    assert run("while True: pass", seconds=0.5, unsafe=True).status == "timeout"


def test_a_python_that_does_not_start(monkeypatch):
    monkeypatch.setattr(sandbox, "COMMAND", [sys.executable, "-c", "raise SystemExit('some\\nlines')"])
    with pytest.raises(UserError, match=r"cannot confine .*\(lines\)"):
        run("pass")
    monkeypatch.setattr(sandbox, "COMMAND", [sys.executable, "-c", "raise SystemExit(7)"])
    with pytest.raises(UserError, match=r"cannot confine .*\(status 7\)"):
        run("pass")
    assert len([thread for thread in threading.enumerate()]) < 50


def test_landlock_is_what_the_table_of_errors_says():
    assert ctypes.CDLL(None).syscall(444, 0, 0, 1) >= 1
