"""Files that are whole or absent, and that are never written through a symbolic link."""
import errno
import hashlib
import json
import math
import os
import re
import shutil
from contextlib import contextmanager

from experiment.data import whole
from experiment.errors import Stop

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def finite(value):
    """Return the value as strict JSON holds it, so that our own reader takes what we write.

    Non-finite floats become None, tensor and numpy scalars numbers, lone surrogates "?".
    """
    if isinstance(value, dict):
        return {whole(str(key)): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, str):
        return whole(value)
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(value, indent=None):
    """Return the value as strict JSON, with a newline at the end."""
    return json.dumps(finite(value), indent=indent, allow_nan=False) + "\n"


def open_to_write(path, mode):
    """Open a text file to write or append. A symbolic link in its place raises OSError."""
    def opener(name, flags):
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)
    return open(path, mode, encoding="utf-8", newline="\n", opener=opener)


def replace_file(path, text):
    """Write a file whole or not at all."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with open_to_write(temporary, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path):
    """Flush a file or folder to the disk, so that it survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def fingerprint(path):
    """Return the size and the sha256 of a file as a dict."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return {"bytes": os.path.getsize(path), "sha256": digest.hexdigest()}


def is_disk_full(error):
    """True if the error means a full disk. Python, safetensors and tokenizers give the number."""
    number = re.search(r"(?:\[Errno|os error) (\d+)", str(error))
    return number is not None and int(number[1]) in DISK_FULL


@contextmanager
def disk_space(path, needed, command):
    """Turn a full disk inside the block into a Stop that names what could not be written.

    Args:
        path: the file or folder that is written.
        needed: its size in bytes.
        command: what continues the run once there is space.
    """
    try:
        yield
    except Exception as error:
        if not is_disk_full(error):
            raise
        free = shutil.disk_usage(path.parent if path.parent.exists() else path.parent.parent).free
        raise Stop(
            f"{path}: cannot be written, it needs {needed} bytes and {free} are free "
            f"({str(error).strip()}); earlier checkpoints are whole; make room, then: {command}",
            4) from None


def check_space(folder, needed):
    """Raise Stop if fewer than `needed` bytes are free in the folder."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise Stop(f"{folder}: checkpoints need {needed} bytes and {free} are free; "
                   "make room, or give another --output_dir", 4)
