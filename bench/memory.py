"""The memory that a run takes at every setting of --memory, counted on a machine that need not have it.

    python bench/memory.py --model_path X --max_tokens 4096 ...       the flags of grpo.py
    python bench/memory.py sft.py --model_path X --batch_size 8 ...   those of another algorithm, or of a fork
    python bench/memory.py                                            docs/memory.md's tables, 10 minutes

The last line is JSON. The tables are written to bench/results/memory.json and drawn as docs/memory.svg.

With flags: what one of the run's steps needs on this machine's GPU, or without one in its memory, and the first
setting that fits. Without: a GRPO step of models of four sizes, rank 16 on all Linears, bfloat16, episodes of GSM8K's
limit of tokens, on a GPU. First every setting with one sequence in a forward pass and 8 episodes that decode at once;
then, for cards, the first setting that fits with the most sequences, and 8 times as many episodes. It is the code of
a run on the meta device (budget.py), whose AdamW has the gradients and moments of the steps before. Torch's allocator
takes up to 27 % more than the tensors by a simulation of its rules (2 to 26 % on an H100 and an H200, but up to 67 %
with stream), and CUDA with its kernels and graphs 820 MiB: the figures of a GPU have both (ALLOCATOR and CONTEXT). Of a
rollout as many episodes decode at once as fit in half of what is free, as in a run.
"""
import datetime
import importlib
import json
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.budget import MIB, Workload, measure  # noqa: E402
from bench.learning import RESULTS, constants, fingerprint  # noqa: E402
from core.config import UserError, options_for  # noqa: E402
from extras.hints.command_line import parse  # noqa: E402
from layers import load_model  # noqa: E402
from extras.memory.techniques import SETTINGS, techniques  # noqa: E402
from core.tiny import make_tiny  # noqa: E402

# hidden, layers, heads, KV heads, MLP, vocabulary, tied: config.json of the Qwen2.5 models
MODELS = {"Qwen2.5-0.5B": (896, 24, 14, 2, 4864, 151936, True), "Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, 151936, True),
          "Qwen2.5-3B": (2048, 36, 16, 2, 11008, 151936, True), "Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064, False)}


TOKENS = 2048  # of an episode of gsm8k
ALLOCATOR, CONTEXT = {"stream": 1.67}, 820  # MiB on the card = tensors x ALLOCATOR (else 1.27) + CONTEXT
OURS = 500  # of the context: what this program takes while it asks how much is free
CARDS = 4, 8, 16, 24  # GiB
SEQUENCES = 1, 2, 4, 8  # in one forward pass
PICTURE = ROOT / "docs" / "memory.svg"
RESULT = 100  # tokens of a tool result, too long to go through decode steps (gsm8k's are short)


def step_mib(name: str, memory: str, sequences: int) -> float:
    """Return the MiB that a card needs for a GRPO step: its update, its rollout, the allocator and the context."""
    from transformers import Qwen2Config
    hidden, layers, heads, kv_heads, mlp, vocabulary, tied = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        Qwen2Config(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers,
                    num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=tied,
                    max_position_embeddings=32768, dtype="bfloat16").save_pretrained(folder)
        make_tiny()[1].save_pretrained(folder)
        episodes = min(8 * sequences, techniques(memory).decode_rows)
        work = Workload(sequences, TOKENS, merge=True, decode_rows=episodes, group_size=8, max_new_tokens=512)
        peaks = measure({"path": folder, "lora_r": 16, "dtype": "bfloat16", "memory": memory}, work)
    return on_card(max(peaks["update"], peaks["rollout"]), memory)


def on_card(peak: float, memory: str) -> float:
    """Return the MiB of a card that a peak of so many bytes takes."""
    return peak / MIB * ALLOCATOR.get(memory, 1.27) + CONTEXT


def settings() -> dict:
    """Return what the figures depend on."""
    return {**constants("memory"), "settings": list(SETTINGS)}


def print_models(path=RESULTS / "memory.json"):
    """Print the tables of docs/memory.md and write them; a call that was stopped continues with the next number."""
    before = json.loads(path.read_text()) if path.exists() else {}
    today = fingerprint(settings())
    table = before["mib"] if before.get("settings") == today else {}
    about = {"command": "python bench/memory.py", "date": datetime.date.today().isoformat(),
             "machine": "any: counted on the meta device", "settings": today, "sequences": SEQUENCES}
    for name in MODELS:
        for memory in SETTINGS:
            counted = table.setdefault(name, {}).setdefault(memory, [])
            for sequences in SEQUENCES[len(counted):]:
                counted.append(round(step_mib(name, memory, sequences)))
                path.write_text(json.dumps({**about, "mib": table}, indent=1) + "\n")
    fits = {str(card): {name: fitting(row, card * 1024) for name, row in table.items()} for card in CARDS}
    path.write_text(json.dumps({**about, "mib": table, "first_that_fits": fits}, indent=1) + "\n")
    draw(table, PICTURE)
    print(f"{'MiB':14}" + "".join(f"{memory:>12}" for memory in SETTINGS))
    for name, row in table.items():
        print(f"{name:14}" + "".join(f"{mib[0]:12,.0f}" for mib in row.values()))
    print(f"\n{'GiB':14}" + "".join(f"{name:>16}" for name in MODELS))
    for card, row in fits.items():
        print(f"{card:<14}" + "".join(f"{words:>16}" for words in row.values()))
    print(json.dumps({name: {memory: mib[0] for memory, mib in row.items()} for name, row in table.items()}))


def draw(table, path):
    """Draw what each model needs at each setting as bars, and the sizes of cards as lines."""
    from bench.pictures import COLORS, figure, save
    picture, panel = figure(width=7.5, height=3.2)
    width = 0.8 / len(SETTINGS)
    for i, memory in enumerate(SETTINGS):
        places = [k + (i - (len(SETTINGS) - 1) / 2) * width for k in range(len(table))]
        panel.bar(places, [row[memory][0] / 1024 for row in table.values()], width, label=memory)
    for card in CARDS:
        panel.axhline(card, color=COLORS["grey"], linestyle=":", linewidth=1)
        panel.text(len(table), card * 1.02, f"{card} GiB card", va="bottom", ha="right", fontsize=9)
    panel.set(yscale="log", ylabel="GiB of a GPU", yticks=[1, 2, 4, 8, 16, 32],
              yticklabels=["1", "2", "4", "8", "16", "32"], ylim=(1, 48), xlim=(-0.6, len(table)))
    panel.set_xticks(range(len(table)), [name.removeprefix("Qwen2.5-") for name in table])
    panel.minorticks_off()
    panel.grid(False)
    panel.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(SETTINGS))
    save(picture, path)


def fitting(row: dict, most: float) -> str:
    """Return the first setting of {setting: MiB of 1, 2, 4 and 8 sequences} that fits, and how many sequences do."""
    for memory, needs in row.items():
        sequences = [2 ** i for i, mib in enumerate(needs) if mib <= most]
        if sequences:
            return f"{memory}, {max(sequences)}"
    return "none"


# ------------------------------------------------------------------------------------------------ the memory of one run
def print_settings(arguments: list[str]) -> dict:
    """Print what a step of a run needs at every setting, and return it in MiB: {setting: {phase: MiB}}.

    arguments: perhaps the file of an algorithm, then the flags of a run.
    """
    program = arguments.pop(0) if arguments[0].endswith(".py") else "grpo.py"
    algorithm = importlib.import_module(Path(program).stem)
    config = algorithm.settle(parse(algorithm.Config, arguments, __doc__))
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    free = free_memory(kind)
    step = workload(algorithm, config, config.memory)
    print(f"MiB for an update of {step.rows} x {step.tokens:,} tokens and a rollout of so many episodes:")
    print(f"{'--memory':12}{'update':>9}{'rollout':>9}{'episodes':>10}{'host':>9}")
    needs = {}
    for memory in SETTINGS:
        work = workload(algorithm, config, memory)
        if kind == "cuda":
            work = work._replace(free=(free - CONTEXT) * MIB)
        try:
            peaks = measure({"path": config.model_path, **options_for(load_model, config), "memory": memory}, work, kind)
        except UserError as error:
            if memory == config.memory:
                raise
            print(f"{memory:12}cannot be used: {error}")
            continue
        update, rollout, host = (peaks.get(phase, 0) / MIB for phase in ("update", "rollout", "host"))
        if kind == "cuda":
            update, rollout = on_card(peaks["update"], memory), on_card(peaks.get("rollout", 0), memory)
        needs[memory] = {"update": update, "rollout": rollout, "host": host}
        print(f"{memory:12}{update:9,.0f}{rollout:9,.0f}{peaks.get('episodes', 0):10}{host:9,.0f}", flush=True)
    print(advice(needs, free))
    return needs


def workload(algorithm, config, memory: str) -> Workload:
    """Return the work of an algorithm's step at a setting, with the larger of its rollout and its evaluation."""
    most = techniques(memory).decode_rows
    tasks = getattr(config, "tasks_per_step", getattr(config, "num_tasks", 0))
    pairs = algorithm.__name__ == "dpo" and config.dataset
    if pairs or getattr(config, "trajectories", None):
        # The episodes are there already.
        tasks = 0
    if getattr(config, "sampler", None) or not config.env:
        # Servers play, here and in evaluations, or nobody does.
        most = 0
    group_size = getattr(config, "group_size", 1)
    episodes = tasks * group_size
    sequences = config.batch_size
    if algorithm.__name__ == "dpo":
        # A pair is two sequences.
        sequences *= 2
    elif episodes:
        sequences = min(sequences, episodes)
    if min(config.eval_tasks, most) > min(episodes, most):
        episodes, group_size = config.eval_tasks, 1
    return Workload(
        sequences, config.max_tokens, getattr(config, "temperature", 1.0),
        # sft updates with the adapter beside the weights, the others with it merged.
        merge=hasattr(algorithm, "merged_to_train"),
        # The weights at the start are kept for a KL penalty.
        keep_start=bool(getattr(config, "kl_coef", 0)),
        decode_rows=min(episodes, most), group_size=group_size,
        max_new_tokens=min(getattr(config, "max_new_tokens", 64), config.max_tokens - 1),
        result_tokens=min(RESULT, config.max_tokens // 2))


def advice(needs: dict, free: float) -> str:
    """Return the first setting that fits into `free` MiB as a sentence, or what else could be changed."""
    largest = {memory: max(mib["update"], mib["rollout"]) for memory, mib in needs.items()}
    for memory, mib in largest.items():
        if mib <= free:
            return f"{free:,.0f} MiB are free here. The first setting that fits is --memory {memory}."
    least = min(largest, key=largest.get)
    return (f"{free:,.0f} MiB are free here. No setting fits, and --memory {least} needs the least: "
            "lower --batch_size or --max_tokens, or take a smaller model.")


def free_memory(kind: str) -> float:
    """Return the MiB that are free on the GPU once this program has ended, or in this machine's memory."""
    if kind == "cuda":
        return torch.cuda.mem_get_info()[0] / MIB + OURS
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) / 1024
    return float("inf")


def main():
    if len(sys.argv) == 1:
        print_models()
        return
    try:
        print(json.dumps(print_settings(sys.argv[1:])))
    except UserError as error:
        sys.exit(f"memory.py: {error}")


if __name__ == "__main__":
    main()
