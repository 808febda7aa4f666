"""bench/pages.py: a page says what bench/results holds, and a figure that is quoted is of today's settings."""
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from bench import learning, pages  # noqa: E402

RUNS = {"command": "python x.py", "runs": [{"seed": 0, "success_before": 0.5, "success_after": 0.91, "seconds": 120.4},
                                           {"seed": 1, "success_before": 0.4, "success_after": 0.9, "seconds": 181.0}],
        "by": {"a b": {"mean": 0.25}, "c": {"mean": 0.75}}}


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    (tmp_path / "first_command.json").write_text(json.dumps(RUNS))
    (tmp_path / "x.json").write_text(json.dumps(RUNS))
    return tmp_path


def test_every_page_says_what_the_results_hold():
    """And every JSON that a page quotes has the hash of today's settings."""
    problems, quoted = [], set()
    for path in pages.pages():
        _, wrong, files = pages.rewrite(path.read_text())
        problems += [f"{path.relative_to(ROOT)}: {line}" for line in wrong]
        quoted |= files
    assert problems + pages.stale(quoted) == []


@pytest.mark.parametrize("words, text", [
    ("x.json runs 0 success_after", "0.91"), ("x.json runs seconds median /60 :.1f", "2.5"), ("x.json runs count", "2"),
    ("x.json by 'a b' mean x100 :.0f", "25"), ("x.json by * mean max", "0.75"), ("x.json command", "python x.py")])
def test_a_figure_in_a_sentence(results, words, text):
    page = f"It takes <!-- = {words} -->?<!-- /= --> in all.\n"
    new, problems, quoted = pages.rewrite(page)
    assert new == page.replace("?", text) and len(problems) == 1 and quoted == {"x.json"}
    assert pages.rewrite(new) == (new, [], {"x.json"})


def test_a_block_is_written_again_and_its_neighbours_stay(results):
    page = ("# A\n\n<!-- begin first_command from first_command.json -->\nold\n<!-- end first_command -->\ntext\n"
            "<!-- begin first_command -->\n<!-- end first_command -->\n")
    new, problems, quoted = pages.rewrite(page)
    assert new.startswith("# A\n\n<!-- begin first_command from first_command.json -->\n|  | seed 0") and "old" not in new
    assert new.count("| after GRPO | **0.910** | **0.900** |\n") == 2 and "\ntext\n" in new
    assert problems == ["block first_command differs from first_command.json"] * 2
    assert pages.rewrite(new) == (new, [], {"first_command.json"})


@pytest.mark.parametrize("page, problem", [
    ("<!-- begin nobody -->\n<!-- end nobody -->", "no function"), ("<!-- begin first_command -->\ntext", "do not pair"),
    ("<!-- = x.json command -->python x.py<!-- /= -->", "begins a line"), ("a <!-- = x.json nothing -->1<!-- /= -->", "KeyError"),
    ("<!-- begin staleness -->\n<!-- end staleness -->", "has no staleness.json yet"), ("a <!-- = y.json nothing -->1<!-- /= -->", "FileNotFoundError")])
def test_what_cannot_be_written_is_named(results, page, problem):
    new, problems, _ = pages.rewrite(page)
    assert new == page and len(problems) == 1 and problem in problems[0]


def test_check_changes_nothing_and_names_file_and_block(results, capsys):
    (results / "README.md").write_text("<!-- begin first_command -->\nold\n<!-- end first_command -->\n")
    assert pages.main(["--check"])
    printed = capsys.readouterr().out
    assert "README.md: block first_command differs" in printed and "settings None" in printed
    assert "old" in (results / "README.md").read_text()
    assert not pages.main(["--stamp", "first_command.json"])
    assert "0.910" in (results / "README.md").read_text() and not pages.main(["--check"])
    data = json.loads((results / "first_command.json").read_text())
    (results / "first_command.json").write_text(json.dumps(data | {"settings": "of yesterday"}))
    assert pages.main(["--check"]) and "run again: python x.py" in capsys.readouterr().out


def test_settings_change_with_what_a_run_computes_and_not_with_where_it_stands():
    today = learning.fingerprint(learning.flags("grpo"))
    assert today == learning.fingerprint(learning.flags("grpo", output_dir="elsewhere", seed=3, kl_coef=0.1))
    for changes in ({"kl_coef": 0.0}, {"learning_rate": 2e-3}, {"max_steps": 50}, {"loss": "dapo"}):
        assert today != learning.fingerprint(learning.flags("grpo", **changes))
    assert learning.flags("grpo", model_path="some/model")["learning_rate"] == 2e-4


def test_constants_of_a_script_are_its_numbers():
    found = learning.constants("merging")
    assert found["steps"] == 40 and found["learning_rate"] == 2e-5 and "output" not in found


def test_the_pictures_of_pages_are_small():
    """Links that lead nowhere are for tests/test_readme.py."""
    for path in pages.pages():
        for name in re.findall(r"!\[[^]]*\]\(([^)#?:]+)\)", path.read_text()):
            if (path.parent / name).exists():
                assert (path.parent / name).stat().st_size < 150_000, f"{path.relative_to(ROOT)}: {name}"


def test_pictures_are_drawn_from_their_json(tmp_path, monkeypatch):
    """The same numbers make the same file, which has no ground of its own."""
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    [picture] = [value for path, value in pages.PICTURES.items() if "reward_hacking" in path]
    monkeypatch.setattr(pages, "PICTURES", {"drawn.svg": picture, "again.svg": picture})
    pages.draw_pictures()
    drawn = (tmp_path / "drawn.svg").read_text()
    assert drawn == (tmp_path / "again.svg").read_text()
    assert "every call that works is paid" in drawn and "#ffffff" not in drawn
