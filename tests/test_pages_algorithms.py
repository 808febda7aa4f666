"""docs/ on the algorithms against the code: quoted lines, named functions, tables of losses, flags, metrics, alarms, exercises."""
import ast
import re
import sys
from functools import lru_cache
from pathlib import Path
from unittest import mock

import pytest
import torch

import distill
import dpo
import grpo
import reward_weighted
import sft
from core.config import options
from extras.show.metrics import METRICS, meaning
from extras.show.notes import ALARMS, HELD_OUT

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
PROGRAMS = {"grpo": grpo, "dpo": dpo, "sft": sft, "reward_weighted": reward_weighted, "distill": distill}
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in PROGRAMS}
ZOO = (ROOT / "docs" / "grpo_zoo.md").read_text()  # its tables continue those of grpo.md
FLAGS = {"config"}.union(*(options(module.Config) for module in PROGRAMS.values()))
OTHER_FLAGS = {"output", "rates"}  # of agent.py and bench/learning_rates.py, in commands


@lru_cache
def definitions(file):
    """Return {name: its source} of the functions, classes, methods and constants of a file."""
    text = (ROOT / file).read_text()
    found = {}
    for node in ast.parse(text).body:
        source = ast.get_source_segment(text, node)
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            for name in ast.walk(target) if target else ():
                if isinstance(name, ast.Name):
                    found[name.id] = source
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = source
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    found[f"{node.name}.{inner.name}"] = ast.get_source_segment(text, inner)
    return found


def quotes(page):
    """Yield (file, function, lines) of what a page quotes: after "# file: function", in one piece each."""
    for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        for part in re.split(r"^(?=# [\w/]+\.py: )", block, flags=re.M):
            head = re.match(r"# ([\w/]+\.py): (\S+)\n", part)
            for piece in re.split(r"^\.\.\.\n", part[head.end():], flags=re.M) if head else ():
                yield head[1], head[2], [line.strip() for line in piece.splitlines()]


def rows(page, header):
    """Return the rows of the table whose first heading this is, as lists of cells."""
    lines = page.splitlines()
    [start] = [i for i, line in enumerate(lines) if line.startswith(f"| {header} |")]
    table = []
    for line in lines[start + 2:]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return table


def column(page, header, number=0):
    return [row[number].strip("`") for row in rows(page, header)]


def papers(text):
    """Return the numbers of the papers on arXiv that a text names."""
    return set(re.findall(r"\b\d{4}\.\d{5}\b", text))


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_quotes_stands_in_the_function_that_it_names(name):
    found = list(quotes(PAGES[name]))
    assert len(found) >= 2
    for file, function, lines in found:
        source = [line.strip() for line in definitions(file)[function].splitlines()]
        assert any(source[i:i + len(lines)] == lines for i in range(len(source))), (file, function, lines)


def test_a_line_that_is_not_in_the_function_is_found():
    page = "```python\n# grpo.py: clipped\nratio = log_ratio.exp()\n...\nratio = log_ratio.exp2()\n```"
    good, bad = (lines for _, _, lines in quotes(page))
    source = [line.strip() for line in definitions("grpo.py")["clipped"].splitlines()]
    assert good[0] in source and bad[0] not in source


@pytest.mark.parametrize("name", PAGES)
def test_every_function_that_a_page_names_is_in_its_file(name):
    named = re.findall(r"`([\w/]+\.py): ([\w.]+)`", PAGES[name])
    assert len(named) >= 12
    assert [(file, thing) for file, thing in named if thing not in definitions(file)] == []
    assert [file for file in re.findall(r"(?:bench|docs)/\w+\.\w+", PAGES[name]) if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_short_and_its_details_are_numbered(name):
    lines = PAGES[name].splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 130
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", PAGES[name], re.M)]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) >= 12


@pytest.mark.parametrize("name", PAGES)
def test_flags_and_metrics_of_a_page_exist(name):
    page = PAGES[name]
    known = FLAGS | OTHER_FLAGS
    assert sorted(flag for flag in set(re.findall(r"--([a-z]\w+)", page)) if flag not in known) == []
    for header in ("metric", "seen"):
        if f"| {header} |" not in page:
            continue
        words = [word for row in rows(page, header) for word in re.findall(r"`([a-z_]+(?:/[a-z_]+)?)`", row[0])]
        assert words and [word for word in words if not (meaning(word) or word in FLAGS)] == []


@pytest.mark.parametrize("name", PAGES)
def test_commands_of_a_page_are_understood(name):
    from core.config import parse
    import talk
    modules = {**PROGRAMS, "agent": talk}
    commands = re.findall(r"^python (\w+)\.py *([^#\n]*)", PAGES[name], re.M)
    assert commands
    for program, words in commands:
        parse(modules[program].Config, words.split())


# ---------------------------------------------------------------------------------------- tables
def test_every_loss_of_grpo_has_a_row_with_its_surrogate_normalizer_settings_and_paper():
    page = PAGES["grpo"]
    table = {row[0].strip("`"): row for row in rows(page, "`--loss`") + rows(ZOO, "`--loss`")}
    assert list(table) == list(grpo.LOSSES)
    source = definitions("grpo.py")["LOSSES"] + definitions("extras/zoo/surrogates.py")["LOSSES"]
    for name, (surrogate, normalizer) in grpo.LOSSES.items():
        row = table[name]
        assert row[1:3] == [f"`{surrogate.__name__}`", f"`{normalizer.__name__}`"]
        settings = {setting: value for setting, value in grpo.PAPER_SETTINGS.get(name, {}).items() if setting != "importance_correction"}
        written = dict(words.split() for words in re.findall(r"`([^`]+)`", row[3]))
        assert written.keys() == settings.keys() and all(str(settings[key]) == value or float(value) == settings[key]
                                                         for key, value in written.items())
        [comment] = re.findall(rf'"{name}": .*# (.*)', source)
        assert papers(comment) and papers(comment) <= papers(row[4]) and comment.partition(" eq")[2][2:] in row[4]
    corrected = [name for name in grpo.LOSSES if "importance_correction" in grpo.PAPER_SETTINGS.get(name, {})]
    assert corrected == [name for name, row in table.items() if row[5] == "f"]
    assert {grpo.PAPER_SETTINGS[name]["importance_correction"] for name in corrected} == {2.0}
    assert "importance_correction 2.0" in page


def test_the_page_of_the_zoo_names_what_is_there():
    from core.config import parse
    lines = ZOO.splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 130
    for words in re.findall(r"^python grpo\.py *([^#\n]*)", ZOO, re.M):
        parse(grpo.Config, words.split())
    assert {word.replace("-", "_") for word in re.findall(r"--([a-z][\w-]+)", ZOO)} - FLAGS == set()
    for name in ("importance_left_out", "off_policy", "filtered", "tasks_easy", "tasks_hard", "echo"):
        assert f"`{name}`" in ZOO and meaning(name)
    code = "".join((ROOT / "extras" / "zoo" / f"{name}.py").read_text() for name in ("surrogates", "credits", "corrections", "filters", "__init__"))
    assert papers(code) <= papers(ZOO)


def test_every_choice_of_grpo_has_a_row():
    page, flags = PAGES["grpo"], options(grpo.Config)
    assert set(column(page, "surrogate") + column(ZOO, "surrogate")) == {surrogate.__name__ for surrogate, _ in grpo.LOSSES.values()}
    assert column(page, "`--credit`") + column(ZOO, "`--credit`") == list(grpo.CREDITS)
    assert column(ZOO, "`--importance_mode`") == list(grpo.CORRECTIONS)
    assert column(ZOO, "`--filter`") == list(flags["filter"].choices)
    for name in ("scale_rewards", "kl_estimator"):
        assert column(page, f"`--{name}`") == list(flags[name].choices)
    papers_of = {name: papers(" ".join(row)) for name, row in zip(column(page, "`--credit`"), rows(page, "`--credit`"))}
    assert papers_of["rloo"] == papers(definitions("grpo.py")["group_advantages"]) - {"2402.03300"}
    assert papers(" ".join(map(" ".join, rows(page, "`--scale_rewards`")))) == papers(definitions("grpo.py")["divisor"])
    assert papers(" ".join(map(" ".join, rows(page, "`--kl_estimator`")))) == papers(definitions("grpo.py")["kl_estimate"])


def test_every_loss_of_dpo_has_a_row_with_its_paper():
    table = {row[0].strip("`"): " ".join(row) for row in rows(PAGES["dpo"], "`--loss`")}
    assert list(table) == list(dpo.LOSSES)
    for name, loss in dpo.LOSSES.items():
        assert papers(loss.__doc__) == papers(table[name]), name
        for equation in re.findall(r"(?:eq\.|section) \d[\d.]*\d|(?:eq\.|section) \d", loss.__doc__):
            assert equation in table[name] or name == "sigmoid", (name, equation)


def test_every_choice_of_reward_weighted_has_a_row_and_every_paper_stands_on_the_page():
    page, flags = PAGES["reward_weighted"], options(reward_weighted.Config)
    for name in ("weighting", "baseline", "scale_rewards", "weight_per"):
        assert column(page, f"`--{name}`") == list(flags[name].choices)
    assert papers(reward_weighted.__doc__) <= papers(page)


def test_papers_of_the_code_stand_on_the_page_of_the_algorithm():
    for name in ("grpo", "dpo", "distill"):
        text = Path(PROGRAMS[name].__file__).read_text()
        assert papers(text) - papers(PAGES[name]) == set()


def test_every_alarm_has_a_row_with_the_flags_of_its_advice():
    table = {row[0].strip("`"): row[-1] for row in rows(PAGES["grpo"], "alarm")}
    assert table.keys() == ALARMS.keys()
    for kind, (_, *advice) in ALARMS.items():
        words = set(re.findall(r"--\w+", " ".join(advice))) - {"--model_path", "--env"}
        assert words - set(re.findall(r"--\w+", table[kind])) <= {"--updates_per_step"}, kind


# ------------------------------------------------------------------------------------- exercises
def exercise(name):
    """Run the exercise of a page in the namespace of its program. Return that namespace."""
    [code] = re.findall(rf"^```python\n# exercise: {name}\.py\n(.*?)^```", PAGES[name], re.M | re.S)
    space = dict(vars(PROGRAMS[name]))
    if "LOSSES" in space:
        space["LOSSES"] = dict(space["LOSSES"])
    exec(code, space)
    return space


def test_the_exercise_of_grpo_scales_the_gradient_of_what_went_well():
    losses = exercise("grpo")["LOSSES"]
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1]])
    advantages = torch.tensor([[0.0, 1.0, 1.0, 0.0], [0.0, -2.0, -2.0, 0.5]])
    gradients = []
    config = grpo.settle(grpo.Config(kl_coef=0.0))
    with mock.patch.dict(grpo.LOSSES, losses):
        for config.loss in ("grpo", "weighted"):
            logprobs = torch.full((2, 4), -1.5, requires_grad=True)
            total, _ = grpo.total_loss(config, grpo.Counts(2, 5, 8), logprobs, logprobs * 0, logprobs.detach(), None,
                                       advantages, mask)
            gradients += torch.autograd.grad(total, logprobs)
    assert gradients[0].abs().sum() > 0
    assert torch.allclose(gradients[1], torch.where(advantages > 0, 0.1, 1.0) * gradients[0])


def test_the_exercise_of_dpo_is_a_loss_of_scores_without_a_reference():
    simpo = exercise("dpo")["LOSSES"]["simpo"]
    logprobs = torch.tensor([[0.0, -1.0, -1.0], [0.0, -3.0, 0.0]], requires_grad=True)
    mask = torch.tensor([[0, 1, 1], [0, 1, 0]])
    losses = [dpo.pair_loss(logprobs, torch.tensor(ref), mask, dpo.Counts(1, 2), {"simpo": (1.0, simpo)}, beta=2.0)[0]
              for ref in ([0.0, 0.0], [-5.0, 2.0])]
    # The gap of the means is 2, so -log sigmoid(2 x 2 - 1).
    assert losses[0] == losses[1] and abs(losses[0].item() - 0.048587) < 1e-5


def test_the_exercise_of_reward_weighted_keeps_what_is_above_the_baseline():
    weights = exercise("reward_weighted")["sign_weights"](torch.tensor([0.5, 0.0, -1.0, 2.0]))
    assert weights.tolist() == [1.0, 0.0, 0.0, 1.0]


def test_the_exercise_of_distill_has_the_gradient_of_the_forward_kl():
    """Over the whole vocabulary, each token as often as the student draws it; no ratio is above 5 here."""
    g = torch.Generator().manual_seed(0)
    student, teacher = (0.3 * torch.randn(6, generator=g, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    p, q = student.log_softmax(-1), teacher.log_softmax(-1)
    assert (q - p).max().exp() < 5
    advantages = exercise("distill")["distillation_advantages"](p, q)
    ours, = torch.autograd.grad(-(p.exp().detach() * advantages * p).sum(), student, retain_graph=True)
    forward, = torch.autograd.grad((q.exp() * (q - p)).sum(), student)
    assert torch.allclose(ours, forward, rtol=1e-9, atol=1e-12)


def test_the_exercise_of_sft_weighs_the_gradient_by_the_probability():
    logprobs = torch.tensor([[0.5, 0.25, 0.125]]).log().requires_grad_()
    loss = exercise("sft")["sft_loss"](logprobs, torch.tensor([[0, 1, 1]]), 2)
    gradient, = torch.autograd.grad(loss, logprobs)
    assert torch.allclose(gradient, torch.tensor([[0.0, -0.125, -0.0625]]))


# --------------------------------------------------------------------------------- docs/metrics.md
def test_the_page_of_metrics_has_every_name_of_the_table_and_says_what_the_closing_table_shows():
    from bench import pages
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert pages.rewrite(page) == (page, [], set())  # `python bench/pages.py` writes it
    assert re.findall(r"^\| `([^`]+)` \|", page, re.M) == list(METRICS)
    assert set(HELD_OUT) <= set(re.findall(r"`([\w/]+)`", page.partition("<!-- begin")[0]))
    assert max(map(len, page.splitlines())) <= 130
