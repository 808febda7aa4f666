"""Build docs/tutorial.ipynb from docs/tutorial.md: the same page, with cells that run.

    python bench/notebook.py

Text becomes a cell of text, without its comments. The word after ``` decides what becomes of a block:

    python        a cell; one that begins with "# NAME.py" writes that file
    bash          a cell: `python grpo.py --seed 1` becomes grpo.train(grpo.Config(seed=1, ...)),
                  whose result a notebook shows with the run's curves; others get a "!"
    bash real     the same, under `if REAL_MODEL:`, which the first cell sets
    bash typed    text: commands that wait for what a person types
"""
import json
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, NOTEBOOK = ROOT / "docs" / "tutorial.md", ROOT / "docs" / "tutorial.ipynb"
PROGRAMS = ("sft", "grpo")  # those that the page calls as functions
WIDTH = 80  # of a line of a call
SETUP = '''\
# Set-up. Where this notebook is not part of a copy of the project, it asks for its address.
import os, re, subprocess, sys
from pathlib import Path

REAL_MODEL = False  # True: chapter 2 runs, too

folders = [Path.cwd(), *Path.cwd().parents]
project = next((f for f in folders if (f / "grpo.py").exists()), None)
if project is None:
    page = input("Address of this notebook on GitHub or Colab: ")
    owner, name = re.search(r"github(?:\\.com)?/([\\w.-]+)/([\\w.-]+)", page).groups()
    name = name.removesuffix(".git")
    clone = ["git", "clone", "--depth", "1", f"https://github.com/{owner}/{name}"]
    subprocess.run(clone, check=True)
    install = [sys.executable, "-m", "pip", "install", "-q", "-r", "requirements.txt"]
    subprocess.run(install, check=True, cwd=name)
    project = Path(name)
os.chdir(project)
sys.path.insert(0, os.getcwd())'''


def blocks(page: str):
    """Yield (kind, text) of every part of the page: kind "" is text, "output" a block without."""
    for i, part in enumerate(re.split(r"^```([^\n]*\n.*?)^```\n", page, flags=re.M | re.S)):
        kind, _, text = part.partition("\n") if i % 2 else ("", "", part)
        kind = kind or "output" * (i % 2)
        if text.strip():
            yield kind, text.strip("\n")


def commands(text: str) -> list[list[str]]:
    """Return the words of each command of a block, without comments."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def literal(text: str) -> str:
    """Return the value of a flag as Python writes it."""
    return text if re.fullmatch(r"-?\d+(\.\d*)?(e-?\d+)?", text) else json.dumps(text)


def call(words: list[str]) -> str:
    """Return the Python call that does what `python PROGRAM.py --flag value ...` does."""
    program = words[1].removesuffix(".py")
    flags = [word.removeprefix("--") for word in words[2::2]]
    arguments = [f"{flag}={literal(value)}" for flag, value in zip(flags, words[3::2], strict=True)]
    lines = [""]
    for argument in (*arguments, "overwrite=True"):
        if lines[-1] and len(lines[-1]) + len(argument) > WIDTH - 8:
            lines.append("")
        lines[-1] += f"{argument}, "
    inside = "\n    ".join(line.rstrip() for line in lines).removesuffix(",")
    return f"{program}.train({program}.Config(\n    {inside}))"


def cell_of(kind: str, text: str) -> str | None:
    """Return the source of the code cell of a block, or None: it is text."""
    if kind == "python":
        name = re.match(r"# (\w+\.py)\n", text)
        return f"%%writefile {name[1]}\n{text}" if name else text
    if kind not in ("bash", "bash real"):
        return None
    imports, lines = set(), []
    for words in commands(text):
        if words[0] == "python" and words[1].removesuffix(".py") in PROGRAMS:
            imports.add(f"import {words[1].removesuffix('.py')}")
            # A notebook shows the value of the last line only.
            lines.append(f"display({call(words)})")
        else:
            lines.append("!" + shlex.join(words))
    source = "\n".join(lines)
    if kind == "bash real":
        source = "if REAL_MODEL:\n" + re.sub(r"^(?=.)", "    ", source, flags=re.M)
    return "\n".join(sorted(imports)) + "\n\n" * bool(imports) + source


def notebook(page: str) -> dict:
    """Return the notebook of the page."""
    sources = []  # [source, is it code?]
    for kind, text in blocks(page):
        code = cell_of(kind, text)
        if code:
            sources.append([code, True])
            continue
        text = re.sub(r"\s?<!--.*?-->", "", text, flags=re.S)
        if kind:
            text = f"```{kind.split()[0].replace('output', '')}\n{text}\n```"
        # A chapter begins a cell, so that the set-up stands before the first one.
        for part in filter(None, re.split(r"^(?=## )", text, flags=re.M)):
            if sources and not sources[-1][1] and not part.startswith("## "):
                sources[-1][0] += f"\n\n{part.strip()}"
            else:
                sources.append([part.strip(), False])
    sources.insert(1, [SETUP, True])
    cells = []
    for i, (source, is_code) in enumerate(sources):
        cell = {"cell_type": "code" if is_code else "markdown", "id": f"cell-{i}", "metadata": {},
                "source": source.splitlines(keepends=True)}
        cells.append(cell | ({"execution_count": None, "outputs": []} if is_code else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel, "accelerator": "GPU"},
            "nbformat": 4, "nbformat_minor": 5}


def written(page: str) -> str:
    """Return the text of the notebook's file."""
    return json.dumps(notebook(page), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(written(PAGE.read_text("utf-8")), "utf-8")
    print(NOTEBOOK.relative_to(ROOT))
