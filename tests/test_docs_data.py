"""The rows that docs/data.md shows are read as it says."""
import json
import re
from pathlib import Path

import pytest

import dpo
import envs
import sft
from core.config import UserError
from core.tiny import make_tiny
from envs.task_files import as_task

pytest.importorskip("extras.data")
from extras.data.demonstrations import Encoder, encoded, read_dataset  # noqa: E402
from extras.data.pairs import encoded_pairs, read_pairs  # noqa: E402

PAGE = (Path(__file__).parent.parent / "docs" / "data.md").read_text()
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
BLOCKS = [(title.split(",")[0], name, rows.splitlines()) for title, text in SECTIONS.items()
          for name, rows in re.findall(r"^```jsonl *(\S*)\n(.*?)^```", text, re.M | re.S)]
ROWS = {kind: [row for title, _, rows in BLOCKS if title == kind for row in rows] for kind in ("Conversations", "Pairs")}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny()[1]


def write(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(row + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("row", ROWS["Conversations"], ids=lambda row: row[:40])
def test_conversation(row, tokenizer, tmp_path):
    config = sft.settle(sft.Config(dataset=write(tmp_path, row), eval_dataset=write(tmp_path, row)))
    [[t], held_out] = encoded(read_dataset(config), tokenizer, config)
    learned = tokenizer.decode([token for token, flag in zip(t.token_ids, t.loss_mask) if flag])
    wanted = {"text": "every token is learned", "instruction": "Good day"}.get(next(iter(json.loads(row))))
    assert (wanted or ("Mia" if "Alder" in row else "5")) in learned and held_out == []
    assert "2 + 3" not in learned and "6" not in learned
    assert ("Two and three" in learned) == ("reasoning_content" in row) and ("Be brief" in tokenizer.decode(t.token_ids)) == ('"system"' in row)


@pytest.mark.parametrize("row", ROWS["Pairs"], ids=lambda row: row[:40])
def test_pair(row, tokenizer, tmp_path):
    config = dpo.settle(dpo.Config(dataset=write(tmp_path, row)))
    [sides] = encoded_pairs(read_pairs(config), config, tokenizer)
    for t, answer in zip(sides, "56"):
        learned = tokenizer.decode([token for token, flag in zip(t.token_ids, t.loss_mask) if flag])
        prompt = tokenizer.decode([token for token, flag in zip(t.token_ids, t.loss_mask) if not flag])
        assert learned.startswith(answer) and "2 + 3" in prompt and "2 + 3" not in learned


TASKS = [(name, row) for title, name, rows in BLOCKS if title == "Tasks" for row in rows]


@pytest.mark.parametrize("name, row", TASKS, ids=[f"{name} {row[:30]}" for name, row in TASKS])
def test_task(name, row):
    if name == "code":
        pytest.importorskip("extras.sandbox")
    cls = envs.load(name)
    task = as_task(cls, json.loads(row))
    first = cls().reset(**task)
    assert first or name == "envs.prompts:Prompts"


@pytest.mark.parametrize("row, says", [
    ('{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "images": ["a.png"]}', "--fields unread=images"),
    ('{"prompt": "x", "completion": "y", "label": false}', "a bad answer is not imitated"),
    ('{"prompt": "x", "prompt": "y", "completion": "z"}', "twice"),
    ('{"prompt": "x", "chosen": "y", "rejected": "z"}', "a pair is given to dpo.py with --dataset"),
    ('{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>y"}]}', "a thought without </think>"),
    ('{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}, '
     '{"role": "assistant", "content": "y"}]}', "need tool after a tool call")])
def test_what_the_page_says_is_refused_is(row, says, tokenizer, tmp_path):
    config = sft.settle(sft.Config(dataset=write(tmp_path, row)))
    with pytest.raises(UserError, match=r"rows\.jsonl:1: ") as error:
        encoded(read_dataset(config), tokenizer, config)
    assert says in str(error.value)


def test_the_page_shows_every_form_that_is_read():
    """Every form that the code names has its row on the page."""
    from extras.data.demonstrations import CONVERSATIONS
    shown = set().union(*(json.loads(row) for row in ROWS["Conversations"] + ROWS["Pairs"]))
    assert CONVERSATIONS | {"instruction", "text", "prompt", "chosen", "rejected"} <= shown
