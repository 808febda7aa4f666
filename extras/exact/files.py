"""Files that are whole or absent, and their fingerprints."""
import hashlib
import os


def replace_lines(path, lines):
    """Write lines of bytes into a file, all or none. They may come from the file itself."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with open(temporary, "wb") as file:
            file.writelines(lines)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path):
    """Flush a file or folder to the disk, so that it survives a power cut."""
    if os.name == "nt":
        # Windows opens no folder, and flushes no file that is open to be read.
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        # Network drives and the shared folders of virtual machines cannot flush a folder.
        if not os.path.isdir(path):
            raise
    finally:
        os.close(handle)


def fingerprint(path):
    """Return the size and the sha256 of a file as a dict."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return {"bytes": os.path.getsize(path), "sha256": digest.hexdigest()}


def paths_in(text):
    """Return what the value of a flag may name as files: itself, or a and b of "a=2,b"."""
    items = list(map(str.strip, text.split(",")))
    return [text, *items, *(item.rpartition("=")[0] for item in items)]
