"""The numbers of the pages, written from bench/results/*.json.

    python bench/pages.py            writes README.md, README.zh.md, docs/ and bench/README.md again
    python bench/pages.py --check    changes nothing; names what differs, and exits with status 1
    python bench/pages.py --draw     draws the pictures again, too

A table stands between two comments, `<!-- begin NAME -->` and `<!-- end NAME -->`. The function
NAME of blocks.py returns its lines. `<!-- begin NAME from FILE.json -->` is the same block.

A figure inside a sentence stands between two comments, too, which no reader sees:

    <!-- = first_command.json runs seconds median /60 :.0f -->3<!-- /= --> minutes

After the file come keys and indices. A key of a list of dicts is taken of each of them, and `*` of
a dict is the list of its dicts, or of its values if it holds none. Then come `min`, `max`, `mean`,
`median`, `sum` or `count`, a factor (`x100`, `/60`), and a format. Such a figure begins no line:
GitHub would take the line for HTML.

A JSON that a page quotes holds "settings", a hash of what its figures depend on (`settings_of` in
learning.py). The check fails where today's code has others. `--stamp FILE` writes today's hash into
a JSON: for a setting that was renamed, or for figures that were read to be of today's settings.
"""
import argparse
import importlib
import json
import re
import shlex
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.blocks import BLOCKS  # noqa: E402
from bench.learning import RESULTS, fingerprint, settings_of  # noqa: E402

BLOCK = re.compile(r"(<!-- begin (\w+)(?: from [\w.]+)? -->\n)(.*?)(<!-- end \2 -->)", re.S)
VALUE = re.compile(r"<!-- = (.+?) -->(.*?)<!-- /= -->", re.S)
REDUCE = {"min": min, "max": max, "mean": statistics.fmean, "median": statistics.median,
          "count": len, "sum": sum}


def load(name):
    """Return what bench/results/NAME holds."""
    return json.loads((RESULTS / name).read_text())


# ---------------------------------------------------------------------------------------- pictures
# A picture, the script that draws it, its JSON, and the part of the JSON that it shows.
PICTURES = {
    "bench/results/first_command.svg": ("first_command", "first_command.json", "runs"),
    "bench/results/reward_hacking.svg": ("reward_hacking", "reward_hacking.json", "rows"),
    "bench/results/tricks.svg": ("tricks", "tricks.json", "summary"),
    "bench/results/staleness.svg": ("staleness", "staleness.json", "summary"),
    "bench/results/four_lessons.svg": ("four_lessons", "four_lessons.json", "rows"),
    "bench/results/real_model_h200.svg": ("real_model", "real_model_h200.json", "seeds"),
    "bench/results/distill.svg": ("distill", "distill.json", "rows"),
    "bench/results/distill_smollm2.svg": ("distill", "distill_smollm2.json", "rows"),
    "bench/results/judge.svg": ("judge", "judge.json", "summary"),
    "bench/results/scale.svg": ("scale", "scale.json", "curves"),
    "docs/memory.svg": ("memory", "memory.json", "mib"),
    **{f"bench/results/{path.name}": ("phenomena", "phenomena.json", "rows")
       for path in sorted(RESULTS.glob("phenomena_*.svg"))},
}


def draw_pictures():
    """Draw every picture whose JSON is there."""
    for path, (script, file, part) in PICTURES.items():
        if not (RESULTS / file).exists():
            continue
        try:
            importlib.import_module(f"bench.{script}").draw(load(file)[part], ROOT / path)
        except KeyError as error:
            print(f"{path}: {file} is of an earlier form, without {error}")


# ----------------------------------------------------------------------------------------- writing
def value(words: str) -> str:
    """Return the text of a figure inside a sentence."""
    name, *words = shlex.split(words)
    found = load(name)
    for word in words:
        if word == "*":
            values = list(found.values())
            found = [item for item in values if isinstance(item, dict)] or values
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
    """Return a page's text as the results have it, what was wrong, and the files that it quotes."""
    problems, quoted = [], set()

    def lines_of(match):
        begin, name, before, end = match.groups()
        if name not in BLOCKS:
            problems.append(f"block {name}: no function of that name in bench/blocks.py")
            return match[0]
        function, files = BLOCKS[name]
        quoted.update(files)
        missing = [file for file in files if not (RESULTS / file).exists()]
        if missing:
            problems.append(f"block {name}: bench/results has no {', '.join(missing)} yet")
            return match[0]
        lines = "".join(line + "\n" for line in function(*(load(file) for file in files)))
        if lines != before:
            problems.append(f"block {name} differs from {', '.join(files) or 'the code'}")
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
    return VALUE.sub(figure, BLOCK.sub(lines_of, text)), problems, quoted


def stale(files) -> list[str]:
    """Return a line for each quoted JSON whose settings are not those of today's code."""
    problems = []
    for name in sorted(name for name in files if (RESULTS / name).exists()):
        stamped, today = load(name).get("settings"), fingerprint(settings_of(name))
        if stamped != today:
            problems.append(f"bench/results/{name}: settings {stamped}, today's are {today}; "
                            f"run again: {load(name).get('command')}")
    return problems


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--draw", action="store_true", help="draw the pictures again, too")
    parser.add_argument("--stamp", metavar="FILE", nargs="+", default=[],
                        help="write the hash of today's settings into these JSONs")
    args = parser.parse_args(argv)
    for name in args.stamp:
        data = load(name) | {"settings": fingerprint(settings_of(name))}
        (RESULTS / name).write_text(json.dumps(data, indent=1) + "\n")
    if args.draw:
        draw_pictures()
    quoted, lines = set(), []
    for path in pages():
        text = path.read_text()
        new, problems, files = rewrite(text)
        quoted |= files
        if not args.check:
            path.write_text(new)
            _, problems, _ = rewrite(new)
        lines += [f"{path.relative_to(ROOT)}: {problem}" for problem in problems]
    lines += stale(quoted)
    print("\n".join(lines) or "every block and figure is as bench/results/ has it")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
