"""The memory of this process, as the operating system sees it."""
import ctypes
import re
import resource
import sys
from pathlib import Path


def give_back_memory():
    """Return freed memory to the system.

    glibc would keep it, and the peaks of rollout and update would add up.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        pass  # another C library


def peak_memory_mb():
    """Return the peak in MiB: what torch allocated on the GPU, else the resident set."""
    torch, status = sys.modules.get("torch"), Path("/proc/self/status")
    if torch and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    if status.exists():
        peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        if peak:
            return int(peak[1]) / 2**10
    # ru_maxrss comes second because it starts from the peak of the process that forked this one.
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
