"""The numbers of the pages, written from bench/results/*.json.

    python bench/pages.py            writes README.md, README.zh.md, docs/ and bench/README.md again
    python bench/pages.py --check    changes nothing; names what differs, and exits with status 1

A table stands between two comments, `<!-- begin NAME -->` and `<!-- end NAME -->`. The function
NAME of this file returns its lines. `<!-- begin NAME from FILE.json -->` is the same block.

A figure inside a sentence stands between two comments, too, which no reader sees:

    <!-- = first_command.json runs seconds median /60 :.0f -->3<!-- /= --> minutes

After the file come keys and indices. A key of a list of dicts is taken of each of them, and `*` of
a dict is the list of its values. Then come `min`, `max`, `mean`, `median` or `count`, a factor
(`x100`, `/60`), and a format. Such a figure begins no line: GitHub would take the line for HTML.

A JSON that a page quotes holds "settings", a hash of what its figures depend on (SETTINGS below).
The check fails where today's code has others. `--stamp FILE` writes today's hash into a JSON: for a
setting that was renamed, or for figures that were read to be of today's settings.
"""
import argparse
import json
import re
import shlex
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "bench" / "results"
BLOCK = re.compile(r"(<!-- begin (\w+)(?: from [\w.]+)? -->\n)(.*?)(<!-- end \2 -->)", re.S)
VALUE = re.compile(r"<!-- = (.+?) -->(.*?)<!-- /= -->", re.S)
REDUCE = {"min": min, "max": max, "mean": statistics.fmean, "median": statistics.median,
          "count": len}


def load(name):
    """Return what bench/results/NAME holds."""
    return json.loads((RESULTS / name).read_text())


# ------------------------------------------------------------------------------------------ blocks
def table(*rows) -> list[str]:
    """Return the lines of a table; the first row is its head."""
    lines = [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


def first_command(data):
    """Success of `python grpo.py` before and after GRPO, seed by seed."""
    runs = data["runs"]
    return table(
        ["", *(f"seed {run['seed']}" for run in runs)],
        ["after SFT", *(f"{run['success_before']:.3f}" for run in runs)],
        ["after GRPO", *(f"**{run['success_after']:.3f}**" for run in runs)],
        ["the whole command, seconds", *(f"{run['seconds']:.0f}" for run in runs)])


def environments(data):
    """Success in each environment before and after GRPO, seed by seed; several share a model."""
    rows = [["`--env`", "model, level", "GRPO", "machine", "before", "after", "gain"]]
    for name in ("writing", "mixed", "search", "search, tiny model", "code",
                 "equations,search,code", "business"):
        run = data["runs"][name]
        together = re.search(r"--env (\S+)", run["grpo"])[1]
        model = {"tiny": "tiny", "smollm2": "SmolLM2-135M, level 1"}[run["model"]]
        steps = re.search(r"--max_steps (\d+)", run["grpo"])[1]
        machine = "an H200" if "H200" in run["machine"] else "2 cores"
        for env in together.split(","):
            key = "success" if env == together else f"success/{env}"
            before, after = ([seed[when][key] for seed in run["seeds"].values()]
                             for when in ("before", "after"))
            spread = run["summary"][key]["gain"]
            gain = f"{spread['mean']:+.2f}"
            if spread.get("half_width"):
                gain += f" ± {spread['half_width']:.2f}"
            if exam := run.get("exam of 300"):
                before, after = [exam["before"]], [exam["after"]]
                gain = f"{after[0] - before[0]:+.2f}"
            label = f"`{env}`" if env == together else f"`{env}` of `{together}`"
            rows.append([label, model, f"{steps} steps", machine, *(", ".join(f"{x:.2f}" for x in values)
                                                        for values in (before, after)), gain])
    return table(*rows)


# The blocks: the function that writes each, and the JSON that it is given.
BLOCKS = {"first_command": (first_command, "first_command.json"),
          "environments": (environments, "environments.json")}


# ---------------------------------------------------------------------------------------- settings
def settings_of(name) -> dict:
    """Return what the figures of a JSON depend on, as today's code has it."""
    from bench.learning import constants, flags
    known = {
        "first_command.json": lambda: flags("grpo"),
    }
    return known[name]() if name in known else constants(Path(name).stem)


# ----------------------------------------------------------------------------------------- writing
def value(words: str) -> str:
    """Return the text of a figure inside a sentence."""
    name, *words = shlex.split(words)
    found = load(name)
    for word in words:
        if word == "*":
            found = list(found.values())
        elif isinstance(found, dict):
            found = found[word]
        elif word.startswith(":"):
            found = format(found, word[1:])
        elif isinstance(found, list) and word.isdigit():
            found = found[int(word)]
        elif isinstance(found, list) and found and isinstance(found[0], dict) and word != "count":
            found = [item[word] for item in found]
        elif word in REDUCE:
            found = REDUCE[word](found)
        else:
            factor = float(word[1:])
            found = found * factor if word[0] == "x" else found / factor
    return found if isinstance(found, str) else f"{found:g}"


def pages() -> list[Path]:
    """Return the pages that may hold figures."""
    found = [ROOT / "README.md", ROOT / "README.zh.md", *sorted((ROOT / "docs").rglob("*.md")),
             ROOT / "bench" / "README.md"]
    return [path for path in found if path.exists()]


def rewrite(text: str) -> tuple[str, list[str], set[str]]:
    """Return a page's text as the results have it, what is wrong with it, and the files it quotes."""
    problems, quoted = [], set()

    def block(match):
        begin, name, before, end = match.groups()
        if name not in BLOCKS:
            problems.append(f"block {name}: no function of that name in bench/pages.py")
            return match[0]
        function, file = BLOCKS[name]
        quoted.add(file)
        lines = "".join(line + "\n" for line in function(load(file)))
        if lines != before:
            problems.append(f"block {name} differs from {file}")
        return begin + lines + end

    def figure(match):
        quoted.add(match[1].split()[0])
        try:
            now = value(match[1])
        except (KeyError, IndexError, TypeError, ValueError, OSError) as error:
            problems.append(f"figure {match[1]}: {type(error).__name__} {error}")
            return match[0]
        if now != match[2]:
            problems.append(f"figure {match[1]} is {now}, not {match[2]}")
        return f"<!-- = {match[1]} -->{now}<!-- /= -->"

    marks = re.findall(r"<!-- (begin|end) (\w+)", text)
    pairs = [(word, match[2]) for match in BLOCK.finditer(text) for word in ("begin", "end")]
    if marks != pairs:
        problems.append(f"begin and end do not pair: {sorted(set(marks) - set(pairs)) or marks}")
    for line in re.findall(r"^ {0,3}<!-- = .*", text, re.M):
        problems.append(f"a figure begins a line: {line[:60]}")
    return VALUE.sub(figure, BLOCK.sub(block, text)), problems, quoted


def stale(files) -> list[str]:
    """Return a line for each quoted JSON whose settings are not those of today's code."""
    from bench.learning import fingerprint
    problems = []
    for name in sorted(files):
        stamped, today = load(name).get("settings"), fingerprint(settings_of(name))
        if stamped != today:
            problems.append(f"bench/results/{name}: settings {stamped}, today's are {today}; "
                            f"run again: {load(name).get('command')}")
    return problems


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--stamp", metavar="FILE", help="write today's settings into a JSON")
    args = parser.parse_args(argv)
    if args.stamp:
        from bench.learning import fingerprint
        data = load(args.stamp) | {"settings": fingerprint(settings_of(args.stamp))}
        (RESULTS / args.stamp).write_text(json.dumps(data, indent=1) + "\n")
    quoted, lines = set(), []
    for path in pages():
        text = path.read_text()
        new, problems, files = rewrite(text)
        quoted |= files
        if not args.check:
            path.write_text(new)
            _, problems, _ = rewrite(new)
        lines += [f"{path.relative_to(ROOT)}: {problem}" for problem in problems]
    lines += stale({name for name in quoted if (RESULTS / name).exists()})
    print("\n".join(lines) or "every block and figure is as bench/results/ has it")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
