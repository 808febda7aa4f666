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
