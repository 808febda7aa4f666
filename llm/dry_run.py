"""--dry_run: print what each setting of the memory dial needs and which is the first that fits."""
from pathlib import Path

import torch
from tqdm import tqdm

from experiment.errors import Stop, UserError
from llm.budget import MIB, Workload, measure
from llm.loading import model_options
from llm.memory import SETTINGS, techniques


def dry_run(config, episodes: int = 0, held_out: int = 0, rows: int | None = None,
            merge: bool = True) -> dict:
    """Print the memory that a step of this run needs and return it in MiB, by its phase.

    On a GPU the run's longest batch is then tried in earnest. On a CPU the count is exact.

    Args:
        config: the algorithm's config, with all values filled in
        episodes: episodes of a step's rollout
        held_out: episodes of an evaluation
        rows: sequences in one forward pass of the update; None: batch_size, at most the episodes
        merge: True if the update runs on merged weights where it can

    Raises Stop with status 1 if the run's own setting does not fit.
    """
    rows = rows or min(config.batch_size, episodes or config.batch_size)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    limit = free_memory(kind)
    print(f"There are {mib(limit)} of free {'GPU ' * (kind == 'cuda')}memory.", flush=True)
    peaks, works = {}, {}
    for memory in tqdm(SETTINGS, "counting", leave=False):
        flags = flags_of(config, memory)
        works[memory] = workload(config, memory, rows, merge, episodes, held_out)
        try:
            peaks[memory] = measure(load_options(config, memory), works[memory], kind)
        except UserError as error:
            if memory == config.memory:
                raise
            tqdm.write(f"{flags} cannot be used: {error}.")
        else:
            tqdm.write(sentence(flags, works[memory], peaks[memory]))
    needs = {memory: need(peaks[memory]) for memory in peaks}
    advice = advise(config, needs, limit, rows)
    if needs[config.memory] > limit:
        raise Stop(f"{flags_of(config, config.memory)} does not fit: it needs "
                   f"{mib(needs[config.memory])} and {mib(limit)} are free. {advice}", 1)
    print(advice)
    own_peaks = peaks[config.memory]
    if kind == "cuda":
        own_peaks = attempt(config, works[config.memory], kind)
    return {phase: nbytes / MIB for phase, nbytes in own_peaks.items()}


def workload(config, memory: str, rows: int, merge: bool, episodes: int, held_out: int) -> Workload:
    """Return the work of a step at a setting, with the larger of rollout and evaluation."""
    most = techniques(memory).decode_rows
    group_size = getattr(config, "group_size", 1)
    if min(held_out, most) > min(episodes, most):
        episodes, group_size = held_out, 1
    # The weights at the start are kept for a KL penalty.
    keep_start = bool(getattr(config, "kl_coef", 0))
    return Workload(
        rows, config.max_tokens, getattr(config, "temperature", 1.0), merge, keep_start,
        decode_rows=min(episodes, most), group_size=group_size,
        max_new_tokens=min(getattr(config, "max_new_tokens", 64), config.max_tokens - 1))


def load_options(config, memory: str) -> dict:
    """Return the arguments of load_model at a setting."""
    return {"path": config.model_path, **model_options(config), "memory": memory}


def flags_of(config, memory: str) -> str:
    """Return the memory flags of this run with another setting of the dial."""
    flags = f"--memory {memory}"
    for name in ("load_in_4bit", "gradient_checkpointing"):
        if getattr(config, name) and not getattr(SETTINGS[memory], name):
            flags += f" --{name}"
    return flags


def need(peaks: dict) -> int:
    """Return the bytes that must be free on the device."""
    return max(peaks["update"], peaks.get("rollout", 0))


def sentence(flags: str, work: Workload, peaks: dict) -> str:
    """Return what a setting needs as a sentence."""
    text = (f"{flags} needs {mib(need(peaks))}: {mib(peaks['update'])} for an update of "
            f"{work.rows} x {work.tokens:,} tokens")
    if work.decode_rows:
        text += f", {mib(peaks['rollout'])} for a rollout of {work.decode_rows} episodes at once"
    if peaks["host"]:
        text += f", {mib(peaks['host'])} of host memory"
    return text + "."


def advise(config, needs: dict, limit: int, rows: int) -> str:
    """Return the first setting that fits, or what else could be changed."""
    for memory in needs:
        if needs[memory] <= limit:
            return f"The first setting that fits is {flags_of(config, memory)}."
    least = min(needs, key=needs.get)
    smaller = "lower --batch_size or --max_tokens" if rows > 1 else "lower --max_tokens"
    return (f"No setting fits; {flags_of(config, least)} needs the least, {mib(needs[least])}: "
            f"{smaller}, or take a smaller model")


def attempt(config, work: Workload, device: str) -> dict:
    """Run the longest batch on the device and print its peak. Raises Stop if memory runs out."""
    flags = flags_of(config, config.memory)
    try:
        peaks = measure(load_options(config, config.memory), work, device, device)
    except (torch.OutOfMemoryError, MemoryError):
        raise Stop(f"{flags} runs out of memory in its longest batch. Take the setting after it, "
                   "or lower --batch_size or --max_tokens", 1) from None
    print(f"The longest batch was tried in earnest: {sentence(flags, work, peaks)}")
    return peaks


def free_memory(kind: str) -> int:
    """Return the bytes that are free on the GPU, or in this machine's memory."""
    if kind == "cuda":
        return torch.cuda.mem_get_info()[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    return 2**63


def mib(nbytes: int) -> str:
    """Return a number of bytes in MiB, for reading."""
    return f"{nbytes / MIB:,.0f} MiB"
