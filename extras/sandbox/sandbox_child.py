"""The process that sandbox.py starts: it confines itself, runs a model's code, and reports.

    python sandbox_child.py < job > report

The job is marshalled. The report is a line of JSON each for the confinement, for the code, and for
every call. What the code prints goes to standard error. Once the code has begun nothing in this
process can be trusted, and the parent trusts nothing of it. Starting is most of what a call costs.
So only modules that load fast are imported: of Python's json only what writes text.

Three layers, none of which needs root:

    rlimits     memory, CPU seconds, the size of a file, open descriptors
    Landlock    of all files only the standard library and shared libraries can be read, and no
                package that is installed
    seccomp     of all system calls only those of SYSCALLS can be made
"""
import marshal
import os
import sys
from _json import encode_basestring_ascii
from struct import pack

NAME = "main.py"  # of the code, in error messages
DEPTH = 100  # of nested values
TEXT = 200  # characters of a value as Python shows it
NUMBERS = type(None), bool, int, float
PLAIN = *NUMBERS, str, list, tuple, set, frozenset, dict

# Every system call that is allowed, by purpose, with its numbers on x86_64 and aarch64 (- where
# there is none). A process with these computes, and reads what Landlock lets it open. It cannot
# start a thread, a process or a program, signal anybody, make a socket, a pipe, shared memory or a
# timer, change a file's name, mode or times, or change its own limits. To find what a new Python
# needs: strace -f -c python -c ...
SYSCALLS = """
memory       brk 12 214  mmap 9 222  munmap 11 215  mremap 25 216  mprotect 10 226  madvise 28 233
open files   read 0 63  readv 19 65  pread64 17 67  write 1 64  writev 20 66  lseek 8 62
             close 3 57  fstat 5 80  dup 32 23  dup2 33 -  dup3 292 24  getdents64 217 61
by name      openat 257 56  newfstatat 262 79  stat 4 -  lstat 6 -  statx 332 291
             access 21 -  faccessat 269 48  faccessat2 439 439  readlink 89 -  readlinkat 267 78
             getcwd 79 17
waiting      clock_nanosleep 230 115  nanosleep 35 101  futex 202 98  select 23 -  pselect6 270 72
             poll 7 -  ppoll 271 73  restart_syscall 219 128  sched_yield 24 124
the clock    clock_gettime 228 113  clock_getres 229 114  gettimeofday 96 169  time 201 -
             times 100 153  getrusage 98 165
handlers     rt_sigaction 13 134  rt_sigprocmask 14 135  rt_sigreturn 15 139  sigaltstack 131 132
who am I     getpid 39 172  getppid 110 173  gettid 186 178  getuid 102 174  geteuid 107 175
             getgid 104 176  getegid 108 177  uname 63 160  sysinfo 99 179
             sched_getaffinity 204 123  getrandom 318 278
the end      exit 60 93  exit_group 231 94
"""
# openat is allowed without O_TRUNC, which also empties a file that is only opened to be read.
# The first two Landlocks do not forbid that.
OPENAT = (257, 56)
O_TRUNC = 0o1000
# To these a kernel that is too old for them would answer ENOSYS, and then the C library takes
# another call: clone3, and all that are newer than this list.
CLONE3, NEWEST = 435, 462
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, AUDIT_ARCH
X32 = 0x40000000  # x86_64 numbers from here on are another table, of 32-bit pointers

KILL, ALLOW, ERRNO = 0x80000000, 0x7FFF0000, 0x50000  # what a filter returns
EPERM, ENOSYS = 1, 38
LOAD, EQUAL, AT_LEAST, ANY, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of BPF
NUMBER, ARCH, THIRD = 0, 4, 32  # offsets in seccomp_data

READ_FILE, LIST, READ = 0b100, 0b1000, 0b1100  # Landlock: read a file, list a folder, both
ALL = (1 << 13) - 1  # all that the first Landlock (Linux 5.13) knows; seccomp refuses the rest


# ------------------------------------------------------------------------------------ confinement
def confine(limits: dict, parent: int):
    """Confine this process for good, or raise OSError, whose text names what is missing.

    Args:
        limits: rlimits, {"CPU": seconds, ...}
        parent: the process without which this one ends.
    """
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)

    def checked(result, what):
        if result < 0:
            error = ctypes.get_errno()
            raise OSError(f"{what}: {os.strerror(error)}")
        return result

    machine = os.uname().machine if hasattr(os, "uname") else "another machine"
    if sys.platform != "linux" or machine not in MACHINES:
        raise OSError(f"neither Linux on x86_64 nor on aarch64, but {sys.platform} on {machine}")
    import resource  # which Windows does not have
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(kind, (value, value))
    # Where the machine's memory ends, the kernel kills this process and not the one that trains.
    with open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
        file.write("1000")
    # PR_SET_PDEATHSIG: this process dies with the thread that started it.
    checked(libc.prctl(1, 9), "prctl")
    if os.getppid() != parent:
        os._exit(1)
    # PR_SET_NO_NEW_PRIVS, then drop what root may do (version 3 of the capabilities, all empty).
    checked(libc.prctl(38, 1, 0, 0, 0), "no_new_privs")
    checked(libc.capset(pack("<Q", 0x20080522), bytes(24)), "capset")
    ruleset = checked(libc.syscall(444, pack("<Q", ALL), 8, 0), "Landlock")
    for path, access in readable().items():
        try:
            fd = os.open(path, os.O_PATH)
        except FileNotFoundError:
            continue
        checked(libc.syscall(445, ruleset, 1, pack("<QI", access, fd), 0), "Landlock")
        os.close(fd)
    checked(libc.syscall(446, ruleset, 0), "Landlock")
    os.close(ruleset)
    instructions = seccomp_filter(*MACHINES[machine])
    code = ctypes.create_string_buffer(instructions)
    program = pack("<QQ", len(instructions) // 8, ctypes.addressof(code))
    checked(libc.prctl(22, 2, program, 0, 0), "seccomp")


def readable() -> dict[str, int]:
    """Return path -> access of what the code may read: Python's library, shared libraries, zones.

    Both stand beside installed packages, of which the program that trains may be one, with the
    solutions of its tasks. So each entry of their folders is allowed by its name.
    """
    library = os.path.dirname(os.__file__)
    # An import lists the folder.
    paths = {library: LIST, "/etc/ld.so.cache": READ_FILE, "/usr/share/zoneinfo": READ}
    paths |= entries(library, is_standard)
    for root in (sys.base_prefix, "/usr", ""):
        paths |= entries(f"{root}/lib", is_shared) | entries(f"{root}/lib64", is_shared)
    return paths


def entries(folder: str, is_allowed) -> dict[str, int]:
    """Return path -> access of those in a folder whose name is allowed; {} if it is no folder."""
    if not os.path.isdir(folder):
        return {}
    with os.scandir(folder) as found:
        return {entry.path: READ if entry.is_dir() else READ_FILE
                for entry in found if is_allowed(entry.name)}


def is_standard(name: str) -> bool:
    """True for an entry of the standard library's folder: what is installed there is none."""
    return (name.partition(".")[0] in sys.stdlib_module_names
            or name in ("lib-dynload", "__pycache__") or name.startswith("_sysconfigdata_"))


def is_shared(name: str) -> bool:
    """True for a shared library, a folder with those of one kind of machine, and the locales."""
    return ".so" in name or name.endswith(("-linux-gnu", "-linux-musl")) or name == "locale"


def seccomp_filter(column: int, arch: int) -> bytes:
    """Return the program of BPF that decides about a system call, 8 bytes an instruction."""
    def instruction(code, k, if_true=0, if_false=0):
        return pack("<HBBI", code, if_true, if_false, k)

    def answer(test, number, action):
        return instruction(test, number, 0, 1) + instruction(RETURN, action)

    program = instruction(LOAD, ARCH) + instruction(EQUAL, arch, 1, 0) + instruction(RETURN, KILL)
    program += instruction(LOAD, NUMBER) + answer(AT_LEAST, X32, KILL)
    program += instruction(EQUAL, OPENAT[column], 0, 4) + instruction(LOAD, THIRD)
    program += answer(ANY, O_TRUNC, ERRNO | EPERM) + instruction(LOAD, NUMBER)
    for number in numbers(column):
        program += answer(EQUAL, number, ALLOW)
    program += answer(EQUAL, CLONE3, ERRNO | ENOSYS) + answer(AT_LEAST, NEWEST, ERRNO | ENOSYS)
    return program + instruction(RETURN, ERRNO | EPERM)


def numbers(column: int) -> list[int]:
    """Return the numbers of SYSCALLS on one machine."""
    words = [word for word in SYSCALLS.split() if word.isdigit() or word == "-"]
    return [int(word) for word in words[column::2] if word != "-"]


# ------------------------------------------------------------------------------------ running code
def run(job: dict, report):
    """Run the code of a job and then its calls. Report each as {"value"} or {"error"}."""
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    report(attempt(lambda: exec(compile(job["code"], NAME, "exec"), module.__dict__)))
    for name, arguments in job["calls"]:
        report(attempt(lambda: getattr(module, name)(*arguments), job["count"]))


def attempt(function, count=False) -> str:
    """Return what a call returned, as JSON: {"value", "operations", "text"} or {"error"}.

    The operations are the lines that were executed, the text the value as Python shows it.
    """
    operations = 0

    def trace(frame, event, _):
        nonlocal operations
        # Importing a module would cost only the first call of a process.
        if frame.f_code.co_filename.startswith(("<frozen", __file__)):
            return None
        operations += event == "line"
        return trace

    try:
        sys.settrace(trace if count else None)
        value = function()
        if count and sys.gettrace() is not trace:
            # The code has stopped the counter.
            operations = None
        sys.settrace(None)
        text = encode(repr(value)[:TEXT])
        return f'{{"value":{encode(value)},"operations":{encode(operations)},"text":{text}}}'
    # SystemExit, KeyboardInterrupt and what derives from BaseException as well.
    except BaseException as error:
        sys.settrace(None)
        return f'{{"error":{encode(describe(error))}}}'


def describe(error: BaseException) -> str:
    """Return an exception as "line 3: ValueError: text"."""
    line, traceback = None, error.__traceback__
    while traceback:
        if traceback.tb_frame.f_code.co_filename == NAME:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    if isinstance(error, SyntaxError):
        line = error.lineno
    place = f"line {line}: " if line else ""
    return f"{place}{type(error).__name__}: {error}"[:1000]


def encode(value, depth: int = DEPTH) -> str:
    """Return a plain value as JSON, or raise ValueError. A Counter is the dict that it holds."""
    kind = next(filter(PLAIN.__contains__, type(value).__mro__), None)
    if kind in NUMBERS:
        words = {"None": "null", "True": "true", "False": "false",
                 "nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
        text = kind.__repr__(value)
        return words.get(text, text)
    if kind is str:
        return encode_basestring_ascii(value)
    if not (kind and depth):
        raise ValueError(f"{type(value).__name__} is not a plain value, or nested too deeply")
    items = value.items() if kind is dict else value
    text = f"[{','.join([encode(item, depth - 1) for item in items])}]"
    names = {dict: "dict", set: "set", frozenset: "set"}
    return f'{{"{names[kind]}":{text}}}' if kind in names else text


def main():
    job = marshal.load(sys.stdin.buffer)
    report_to = os.dup(1)
    os.dup2(2, 1)
    # input() shall find the end of a file, and the folder of this file is not to import from.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path.pop(0)

    def report(line: str):
        os.write(report_to, line.encode() + b"\n")

    if not job["unsafe"]:
        confine(job["limits"], job["parent"])
    report("{}")
    run(job, report)
    os._exit(0)


if __name__ == "__main__":
    main()
