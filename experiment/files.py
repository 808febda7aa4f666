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
BLOCK = 2**20       # bytes
SAMPLED_BLOCKS = 64


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
    temporary.unlink(missing_ok=True)
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


def fingerprint(path, sample_above=math.inf):
    """Return the size and the sha256 of a file as a dict.

    Of a file larger than `sample_above` bytes only 64 blocks of 1 MiB are hashed, evenly spread
    from the first, which in a safetensors file holds the header, to the last.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        if size <= sample_above:
            digest = hashlib.file_digest(file, "sha256")
        else:
            digest = hashlib.sha256()
            for block in range(SAMPLED_BLOCKS):
                file.seek((size - BLOCK) * block // (SAMPLED_BLOCKS - 1))
                digest.update(file.read(BLOCK))
    return {"bytes": size, "sha256": digest.hexdigest()}


def is_disk_full(error):
    """True if the error means a full disk; safetensors and tokenizers say it in their own texts."""
    return getattr(error, "errno", None) in DISK_FULL or bool(
        re.search(r"os error (27|28|122)\b", str(error)))


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
