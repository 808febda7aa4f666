"""docs/models.md and docs/map.md: what they count and list is what the code has."""
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODELS = (ROOT / "docs" / "models.md").read_text()


def test_the_verdicts_are_those_that_are_tested():
    import decoders
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| ([^|]+) \|$", MODELS, re.M)
    verdicts = ["runs", "trains", "refused", "not made"]
    counts = Counter(decoders.TABLE.values())
    assert [int(number) for _, number, _ in rows] == [counts[verdict] for verdict in verdicts]
    for (_, _, examples), verdict in zip(rows, verdicts):
        assert {decoders.TABLE[name] for name in examples.split(", ")} == {verdict}
    assert f"transformers {decoders.VERSION[:-1]} " in MODELS


def test_the_families_that_are_compared():
    text = (ROOT / "tests" / "extras" / "models" / "test_models.py").read_text()
    families = re.search(r'^FAMILIES = """(.*?)"""', text, re.M | re.S)[1].split()
    assert f"For {len(families)} families `tests/extras/models/test_models.py`" in MODELS


MARKUPS = re.findall(r"^(\S.*?)  +(\S.*)$", re.search(r"```text\n(.*?)```", MODELS, re.S)[1], re.M)


@pytest.mark.parametrize("family, text", MARKUPS, ids=[family for family, _ in MARKUPS])
def test_every_markup_is_read(family, text):
    from core.tool_calls import parse_tool_calls
    if not (ROOT / "extras" / "models").is_dir() and family not in ("Hermes, Qwen2.5, Qwen3", "JSON alone"):
        pytest.skip("needs extras/models")
    look = {"name": "look", "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}}
    assert parse_tool_calls(text, {"look": look}) == ("", [{"name": "look", "arguments": {"query": "x"}}], [])


# ------------------------------------------------------------------------------------------------ docs/map.md
MAP = (ROOT / "docs" / "map.md").read_text()


def test_the_counts_of_lines():
    """To within a tenth and 30 lines: a page need not change with every line of code."""
    rows = re.findall(r"^\| \d+ \| (.+?) \| ([\d,]+) \|", MAP, re.M)
    assert len(rows) == 11
    for files, lines in rows:
        real = sum(len((ROOT / file).read_text().splitlines()) for file in re.findall(r"`(.+?)`", files))
        shown = int(lines.replace(",", ""))
        assert shown % 50 == 0 and abs(shown - real) <= 30 + real // 10, f"{files} has {real} lines"


def test_every_layer_has_its_row():
    layers = {path.parent.name for path in (ROOT / "extras").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)/` \| .+ \| .+ \| .+ \|$", MAP, re.M)) >= layers


def test_what_a_plain_run_loads():
    """The figures are near the bounds of tests/test_layers.py."""
    text = (ROOT / "tests" / "test_layers.py").read_text()
    files, lines, core = map(int, re.search(r"len\(files\) <= (\d+) and lines <= (\d+) and in_core <= (\d+)", text).groups())
    shown = re.search(r"loads (\d+) files of about ([\d,]+) lines, of which about ([\d,]+) are", " ".join(MAP.split()))
    told = [int(number.replace(",", "")) for number in shown.groups()]
    assert told[0] == files and abs(told[1] - lines) <= 100 and abs(told[2] - core) <= 60


def test_every_name_of_the_map_exists():
    """`name` in `file`, and what the example of Python imports."""
    for name, file in (("collect_groups", "core/data.py"), ("merged", "lora.py"), ("reference", "lora.py"), ("token_logprobs", "core/logprobs.py")):
        assert f"def {name}(" in (ROOT / file).read_text()
    compile(re.search(r"```python\n(.*?)```", MAP, re.S)[1], "map.md", "exec")
    import agent
    import core
    import core.engine
    import layers
    import lora
    for module, names in ((agent, "Trajectory evaluate rollout Episode"), (core, "save_model token_logprobs"), (layers, "load_model"),
                          (lora, "Adapter"), (core.engine, "EngineProtocol")):
        assert all(hasattr(module, name) for name in names.split())


# ------------------------------------------------------------------------------------------------ docs/running.md
def test_the_exit_statuses():
    from core.config import EnvironmentFault, UserError, main
    page = (ROOT / "docs" / "running.md").read_text()
    told = dict(re.findall(r"^\| (\d|128 \+ n) \| (.+) \|$", page, re.M))
    assert sorted(told) == ["0", "1", "128 + n", "2", "3", "4", "5", "6"]
    assert UserError.code == 2 and EnvironmentFault.code == 6 and "environment" in told["6"]
    # What core says of the statuses that layers add, in its docstring.
    layers = dict(re.findall(r"(\d) \((.+?)\)", " ".join(main.__doc__.split("Layers")[1].split())))
    assert {code: words.split()[-1] for code, words in layers.items()} == {code: told[code].split()[-1] for code in "345"} | {"5": "gone"}


def test_every_evaluated_figure_is_there():
    """No page is left with a word that stands for a figure."""
    for page in (ROOT / "docs").rglob("*.md"):
        assert not re.search(r"\b(TODO|TIMES|MEMTIME|XXX)\b", page.read_text()), page.name
