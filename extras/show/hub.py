"""What is in a folder, and the way to the hub: what `python lora.py info` and `push` run.

    python lora.py info FOLDER
    python lora.py push FOLDER owner/name [--base owner/model] [--private] [--dry_run]

FOLDER is an output folder (its newest checkpoint), an adapter or a model. `push` uploads weights,
tokenizer and a model card, README.md, that is made from the run; the optimizer stays here. With
--dry_run it writes the card beside the weights instead. The words of the card: card*.md.
"""
import argparse
import math
import re
import sys
from pathlib import Path
from string import Template
from types import SimpleNamespace

from safetensors import safe_open

from core.config import UserError
from core.data import read_json, read_text, to_json
from core.model import ADAPTER, base_of, is_adapter, newest
from core.run import CONFIG, algorithm_of, set_aside
from envs.task_files import config_of
from extras.show.notes import CHANGED, HELD_OUT, SHARES, wilson

DATA = ("env", "dataset", "tasks", "trajectories", "eval_dataset", "rewards")  # flags
NOT_UPLOADED = ("optimizer.safetensors", "state.json", "README.md", ADAPTER)  # as they are


def look_into(source: str):
    """Return what is known of a folder. Raises UserError if it holds no weights of ours.

    Attributes: path of the weights; run, its folder, with its algorithm (or None), flags (as text),
    step and result; adapter, its config ({} for a model); base; shapes {tensor: its shape}.
    """
    path = Path(newest(source))
    if not (is_adapter(path) or (path / "config.json").exists()):
        raise UserError(f"{source}: holds no run with a checkpoint, no adapter and no model")
    run = path.resolve().parents[1] if path.parent.name == "checkpoints" else path
    files = path / ADAPTER, path / "state.json", run / "result.json"
    adapter, state, result = map(json_if_there, files)
    shapes = {}
    for file in path.glob("*model*.safetensors"):
        with safe_open(file, "pt") as tensors:
            shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}
    return SimpleNamespace(
        path=path, run=run, algorithm=algorithm_of(run), flags=config_of(run), result=result,
        step=state.get("step"), adapter=adapter, base=base_of(path) if adapter else "",
        shapes=shapes)


def json_if_there(path) -> dict:
    """Return what a JSON file holds, {} if there is none."""
    return read_json(path) if path.exists() else {}


def kind_of(folder) -> str:
    """Return what the weights of a folder are, in words."""
    layers = set()
    for name in folder.shapes:
        layers.update(re.findall(r"\.(\d+)\.", name)[:1])
    if not folder.adapter:
        return f"a model of {len(layers)} layers"
    adapter = folder.adapter
    return (f"a LoRA adapter of rank {adapter['r']} (alpha {adapter['lora_alpha']}) on "
            f"{len(layers)} layers of {folder.base}")


def info(source: str) -> str:
    """Return lines that say what a folder is."""
    folder = look_into(source)
    template = folder.path / "chat_template.jinja"
    lines = {"folder": folder.path, "holds": kind_of(folder)}
    if folder.adapter:
        lines["adapts"] = ", ".join(folder.adapter["target_modules"])
    if folder.algorithm:
        start = folder.flags["model_path"]
        lines["run"] = f"{folder.algorithm}, after step {folder.step}; from {start}"
    if template.exists():
        text = read_text(template)
        tools = "with" if "tools" in text else "without"
        lines["template"] = f"{len(text):,} characters, {tools} tools"
    weights = sum(map(math.prod, folder.shapes.values()))
    sizes = {file.name: file.stat().st_size / 2**20 for file in folder.path.glob("*.*")}
    files = ", ".join(f"{name} {size:,.1f} MiB" for name, size in sizes.items() if size >= 0.1)
    lines["sizes"] = f"{weights:,} parameters; {files}"
    return "\n".join(f"{name + ':':10}{line}" for name, line in lines.items())


# ---------------------------------------------------------------------------------- the model card
def number(metrics: dict, name: str) -> str:
    """Return a number of an evaluation, a share with its 95 % interval, or "-"."""
    value, n = metrics.get(name), metrics.get(SHARES.get(name))
    if value is None or not n:
        return "-" if value is None else f"{value:.3f}"
    low, high = wilson(value * n, n)
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


def card(folder, name: str, base: str) -> str:
    """Return the model card of a folder that is called `name` on the hub.

    base is the hub id of an adapter's base model, "" where that is uploaded as base/.
    """
    words = {"name": name, "short": name.rpartition("/")[2], "what": kind_of(folder),
             "algorithm": folder.algorithm or "agent", "header": "library_name: transformers",
             "training": "", "imports": ""}
    if folder.adapter:
        words["header"] = "library_name: peft"
        # vLLM knows powers of two, from 8 on.
        words["rank"] = 1 << max(3, (folder.adapter["r"] - 1).bit_length())
        words["imports"] = "import huggingface_hub as hub\n"
        words["base"] = f'hub.snapshot_download("{name}") + "/base"'
        words["base_path"] = f"{words['short']}/base"
    if base:
        words["header"] += f"\nbase_model: {base}"
        words |= {"imports": "", "base": f'"{base}"', "base_path": base}
    if folder.algorithm:
        words["training"] = filled("card_run.md", words | run_words(folder))
    words["loading"] = filled(f"card_{'adapter' if folder.adapter else 'model'}.md", words)
    return filled("card.md", words)


def run_words(folder) -> dict:
    """Return what the card says of a run: its step, data, flags and results."""
    before, after = (folder.result.get(when) or {} for when in ("before", "after"))
    names = [*HELD_OUT, *(name for name in after if name.startswith("success/"))]
    rows = [f"| {name} | {number(before, name)} | {number(after, name)} |"
            for name in names if after.get(name) is not None]
    # Without extras/show a run does not say which differ: all of them are shown.
    line = re.search(f"^{CHANGED}(.*)$", read_text(folder.run / CONFIG), re.M)
    changed = line[1].split(", ") if line else folder.flags
    flags = {flag: value for flag, value in folder.flags.items() if value and flag != "output_dir"}
    return {"step": folder.step, "rows": "\n".join(rows), "tasks": after.get("episodes", "no"),
            "data": ", ".join(f"`--{flag} {flags[flag]}`" for flag in DATA if flag in flags),
            "flags": "\n".join(f"{flag}: {flags[flag]}" for flag in changed if flag in flags)}


def filled(template: str, words: dict) -> str:
    """Return the text of a template with these words in it."""
    return Template(read_text(Path(__file__).with_name(template))).substitute(words)


def push(source: str, name: str, base: str | None, private: bool, dry_run: bool) -> str:
    """Upload a folder with its card in one commit, or write the card; return what was done."""
    folder = look_into(source)
    files = {file.name: file for file in folder.path.glob("*.*") if file.name not in NOT_UPLOADED}
    base = base or folder.base
    if Path(base).is_dir() and folder.adapter:
        if Path(base).parent not in (folder.path.resolve(), folder.run):
            raise UserError(f"{source}: its base model is {base}, a folder that others do not "
                            "have; name it on the hub (--base owner/model), or merge first "
                            f"(python lora.py merge {source} FOLDER) and push that folder")
        files |= {f"base/{file.name}": file for file in Path(base).glob("*.*")}
        base = ""
    folder.base = base or "the model in base/"
    text = card(folder, name, base)
    if dry_run:
        path = folder.path / "README.md"
        if path.exists() and read_text(path) != text:
            set_aside(path)
        path.write_text(text, "utf-8")
        return f"written: {path}; not uploaded: {', '.join(sorted(files))}"
    files["README.md"] = text.encode()
    if folder.adapter:
        adapter = folder.adapter | {"base_model_name_or_path": base or f"{name}/base"}
        files[ADAPTER] = to_json(adapter, indent=2).encode()
    # The other commands do not wait for it.
    from huggingface_hub import CommitOperationAdd, HfApi
    api = HfApi()
    api.create_repo(name, private=private, exist_ok=True)
    done = api.create_commit(name, [CommitOperationAdd(*item) for item in files.items()],
                             commit_message=f"{folder.algorithm or 'model'}, by lora.py push")
    return f"uploaded: {name}, {len(files)} files, {done.commit_url}"


def main(words: list[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="lora.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    pushing = commands.add_parser("push")
    for command in (commands.add_parser("info"), pushing):
        command.add_argument("source", metavar="FOLDER")
    pushing.add_argument("name", metavar="owner/name")
    pushing.add_argument("--base", metavar="owner/model", help="the hub id of the base model")
    for switch in ("--private", "--dry_run"):
        pushing.add_argument(switch, action="store_true")
    args = vars(parser.parse_args(words))
    act = {"push": push, "info": info}[args.pop("command")]
    try:
        print(act(**args))
    except (ValueError, OSError) as error:
        print(f"lora.py: {' '.join(str(error).split())[:400]}", file=sys.stderr)
        return 2
    return 0
