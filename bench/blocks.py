"""The tables of the pages: a function for each block, from what its JSONs in bench/results hold.

`<!-- begin NAME -->` on a page is the block that the function NAME returns, line by line.
bench/pages.py writes it.
"""
import re
import statistics
from functools import partial

BLOCKS = {}  # by name: the function that returns a block's lines, and the JSONs that it is given


def block(*files):
    """Register a function of what some JSONs hold as the block of its name.

    A block without JSONs is made from the code.
    """
    def register(function):
        BLOCKS[function.__name__] = function, files
        return function
    return register


def table(*rows) -> list[str]:
    """Return the lines of a table; the first row is its head."""
    lines = [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


def between(values, form="") -> str:
    """Return the range of some numbers as a table shows it."""
    low, high = (format(value, form) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


IN_FRONT = ("first_command.json", "vs_trl.json", "gpu_h100_80gb_hbm3.json", "real_model_h200.json",
            "gsm8k.json")


def front_page(first, speed, gpu, real, gsm8k) -> list[list[str]]:
    """Return (figure, command, page) of each row of README's table."""
    def success(runs):
        before, after = ([run[f"success_{when}"] for run in runs] for when in ("before", "after"))
        return f"{statistics.fmean(before):.2f} → **{statistics.fmean(after):.2f}**"

    def times(kind):
        taken = [one for one in speed["measurements"] if one["bfloat16"] == kind]
        same = [one["same_dtype"]["time_ratio"] for one in taken if "same_dtype" in one]
        return (f"**{between([one['time_ratio'] for one in taken], '.1f')}** x "
                f"({between(same, '.1f')} x), {between([m['memory_ratio'] for m in taken], '.2f')}")

    exams = gsm8k["held_out"]
    after, greedy = ([exam[how] for name, exam in exams.items() if name.startswith("grpo")]
                     for how in ("pass@1", "greedy"))
    minutes = statistics.median(run["seconds"] / 60 for run in first["runs"])
    card = gpu["shapes"]["0.5B"]["trl"]
    trl = "`python bench/vs_trl.py`", "[speed](bench/README.md)"
    return [
        [success(first["runs"]), "`python grpo.py`", "[tutorial](docs/tutorial.md)"],
        [f"{minutes:.1f} min", "`python grpo.py`", "[tutorial](docs/tutorial.md)"],
        [times("fast"), *trl],
        [times("slow"), *trl],
        [f"**{card['time_ratio']:.1f}** x ({card['same_dtype']['time_ratio']:.1f} x), "
         f"{card['memory_ratio']:.2f}", "`python bench/gpu.py --parts trl`",
         "[GPU](bench/log/gpu.md)"],
        [success([seed["rows"]["grpo"] for seed in real["seeds"]]),
         "`python bench/real_model.py --grpo_steps 40`", "[GRPO](docs/grpo.md)"],
        [f"{exams['sft']['pass@1']:.3f} → **{between(after, '.3f')}** "
         f"({exams['sft']['greedy']:.2f} → {between(greedy, '.2f')})",
         "`python bench/gsm8k.py`", "[GSM8K](bench/log/gsm8k.md)"],
        ["1e-9", "`pytest tests/core/test_grpo_equations.py tests/test_dpo.py`",
         "[losses](docs/grpo.md)"]]


@block(*IN_FRONT)
def results(first, *others):
    """README's table."""
    seeds = len(first["runs"])
    rows = [f"equations solved, of 200 held out: the tiny model, mean of {seeds} seeds",
            "the time it takes on two cores, median",
            "a GRPO step of SmolLM2-135M on a CPU that is fast in bfloat16: speed relative to TRL + "
            "PEFT without vLLM (to TRL in our dtype), and memory",
            "the same on a CPU that is slow in bfloat16",
            "the same on an H100, at Qwen2.5-0.5B's shape",
            "equations solved by SmolLM2-135M, of 100 held out: 40 steps on an H200, three seeds",
            "GSM8K solved by SmolLM2-135M, of 400 held out: 40 steps after SFT, two seeds "
            "(greedily)",
            "losses and gradients equal TRL's, in float64, to a relative"]
    return table(["what", "figure", "command", "more"],
                 *([words, *row] for words, row in zip(rows, front_page(first, *others))))


@block(*IN_FRONT)
def results_zh(first, *others):
    """The same table in README.zh.md."""
    rows = [f"微型模型解出的方程（200 道留出题，{len(first['runs'])} 个种子的平均）", "在两个 CPU 核上所需时间（中位数）",
            "SmolLM2-135M 的一步 GRPO，在 bfloat16 较快的 CPU 上：速度相对 TRL + PEFT（不用 vLLM；"
            "括号内为相同精度的 TRL），以及内存之比",
            "同上，在 bfloat16 较慢的 CPU 上", "同上，在 H100 上，Qwen2.5-0.5B 的形状",
            "SmolLM2-135M 解出的方程（100 道留出题）：H200 上 40 步，三个种子",
            "SmolLM2-135M 解出的 GSM8K（400 道留出题）：SFT 之后 40 步，两个种子（括号内为贪心解码）",
            "损失与梯度同 TRL 一致（float64），相对误差"]
    lines = table(["内容", "数值", "命令", "详情"],
                  *([words, *row] for words, row in zip(rows, front_page(first, *others))))
    return [line.replace(" to ", " – ").replace(" min |", " 分钟 |") for line in lines]


@block("first_command.json")
def first_command(data):
    """Success of `python grpo.py` before and after GRPO, seed by seed."""
    runs = data["runs"]
    return table(
        ["", *(f"seed {run['seed']}" for run in runs)],
        ["after SFT", *(f"{run['success_before']:.3f}" for run in runs)],
        ["after GRPO", *(f"**{run['success_after']:.3f}**" for run in runs)],
        ["the whole command, seconds", *(f"{run['seconds']:.0f}" for run in runs)])


@block("environments.json")
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
            successes = [", ".join(f"{x:.2f}" for x in values) for values in (before, after)]
            rows.append([label, model, f"{steps} steps", machine, *successes, gain])
    return table(*rows)


@block("vs_trl.json")
def vs_trl(data):
    """How many times faster a step is than TRL's, by kind of processor."""
    rows = [["processor", "times faster, medians", "single rounds", "TRL in our bfloat16",
             "memory, ours / TRL's", "our step, seconds", "measurements"]]
    for kind, words in data["kinds"].items():
        taken = [one for one in data["measurements"] if one["bfloat16"] == kind]
        same = [one["same_dtype"]["time_ratio"] for one in taken if "same_dtype" in one]
        rounds = [ratio for one in taken for ratio in one["time_ratios"]]
        rows.append([words, f"**{between([one['time_ratio'] for one in taken], '.1f')}**",
                     between(rounds, ".1f"), between(same, ".1f"),
                     between([one["memory_ratio"] for one in taken], ".2f"),
                     between([one["rows"]["ours"]["step_seconds"] for one in taken], ".0f"),
                     len(taken)])
    return table(*rows)


@block("reward_hacking.json")
def reward_hacking(data):
    """The first and the last step of runs with a reward that can be gamed, and one that cannot."""
    from bench.reward_hacking import table as lines
    return lines(data["rows"]).splitlines()


@block("tricks.json")
def tricks(data):
    """One change at a time, best first."""
    from bench.tricks import table as lines
    return lines(data["summary"]).splitlines()


@block("staleness.json")
def staleness(data):
    """Success against the age of the episodes."""
    from bench.staleness import table as lines
    return lines(data["summary"]).splitlines()


@block("memory.json")
def memory_models(data):
    """MiB of a GPU for a step, by model and setting."""
    settings = list(next(iter(data["mib"].values())))
    return table(["`--memory`", *settings],
                 *([name, *(f"{row[setting][0]:,}" for setting in settings)]
                   for name, row in data["mib"].items()))


@block("memory.json")
def memory_cards(data):
    """The first setting that fits on a card, with the most sequences in a forward pass."""
    fits = data["first_that_fits"]
    return table(["card", *(name.removeprefix("Qwen2.5-") for name in data["mib"])],
                 *([f"{card} GiB", *(f"`{words}".replace(",", "`,") for words in row.values())]
                   for card, row in fits.items()))


@block("gpu_h200.json")
def gpu_speeds(data):
    """Tokens a second by setting of --memory, of Qwen2.5-0.5B's shape in bfloat16."""
    taken = data["steps"] | data["steps_with_larger_tiles"]
    rows = [["`--memory`", "decoding, 8 rows", "32 rows", "update of 8 x 1,024", "of 1 x 1,024"]]
    for setting in ("plain", "4bit", "small", "stream"):
        parts = data["steps"][setting] | taken[setting]
        cells = [f"`{setting}`"]
        for count in (8, 32):
            step = parts.get(f"decode {count}")
            cells.append(f"{1000 * count / step['step_ms']:,.0f}" if step else "not measured")
        cells += [f"{parts[f'update {count}x1024']['tokens_per_second']:,.0f}" for count in (8, 1)]
        rows.append(cells)
    return table(*rows)


@block("cards.json")
def small_cards(data):
    """Estimated seconds of a step on small cards, by model, at the first setting that fits."""
    rows = [["card", "model", "`--memory`", "rollout, s", "update, s", "step, s", "the limit"]]
    for row in data["rows"]:
        seconds = [f"{row[name]:.0f}" for name in ("rollout_seconds", "update_seconds",
                                                   "step_seconds")]
        rows.append([row["card"], row["shape"], f"`{row['memory']}`", *seconds, row["limit"]])
    return table(*rows)


@block("merging.json")
def merging(data):
    """What 40 steps at a small learning rate come to, by how the weights are held."""
    ways = {"merged": "bfloat16, adapter merged (the default)",
            "beside": "bfloat16, adapter beside the weights",
            "nearest": "bfloat16, merged and rounded to the nearest", "float32": "float32"}
    return table(["weights", "loss before", "after", "share of the update that is kept"],
                 *([words, f"{data[way]['before']:.3f}", f"{data[way]['after']:.3f}",
                    f"{data[way]['merge_kept']:.3f}"] for way, words in ways.items()))


@block("client_loop.json")
def client_loop(data):
    """What becomes of an agent in a client's loop, by how its episodes ended in training."""
    words = {"done": "`done`, at the tool that takes the answer",
             "text": "a turn of text (`Stops`)"}
    return table(
        ["episodes in training ended by", "solved", "calls after the answer, mean (most)",
         "the client's loop ended in words", "by a broken call", "not in 25 turns"],
        *([words[name], f"{row['solved']:.2f}",
           f"{row['calls_after_answer_mean']:.1f} ({row['calls_after_answer_max']})",
           *(f"{row[how]:.2f}" for how in ("ended_in_words", "ended_by_broken_call",
                                           "never_ended"))]
          for name, row in data["runs"].items()))


@block("adapter_rounding.json")
def adapter_rounding(data):
    """How much of the gain of training an adapter keeps, by how it is applied in bfloat16."""
    ways = {"peft": "PEFT, adapter applied", "peft_merged": "PEFT, `merge_and_unload`",
            "lora_py_merge": "merged by this project", "trained": "the weights that were trained"}
    steps = [row for row in data["by_step"] if row["step"]]
    return table(["steps of training", *ways.values()],
                 *([row["step"], *(f"{row['kept'][way]:.0%}" for way in ways)] for row in steps))


@block("lesson_05.json")
def lesson_05(data):
    """Wrong signs of each credit, and what it teaches, all seeds in a cell."""
    rows = [["credit", "useful, A < 0, seeds 0 to 2", "useless, A > 0",
             "paid in every turn: steps to 0.9", "paid at the end: chance to look"]]
    for name in data["runs"][0]["judged"]:
        judged = [run["judged"][name] for run in data["runs"]]
        chain, look = ([run["curves"][game][name] for run in data["runs"]]
                       for game in data["runs"][0]["curves"])
        steps = (next((i for i, p in enumerate(curve, 1) if p >= 0.9), "never") for curve in chain)
        rows.append([name, ", ".join(f"{row['blamed']:.0%}" for row in judged),
                     ", ".join(f"{row['praised']:.0%}" for row in judged),
                     ", ".join(map(str, steps)),
                     ", ".join(f"{curve[-1]:.2f}" for curve in look)])
    return table(*rows)


@block("lesson_06.json")
def lesson_06(data):
    """Reward, success and turns, from the first to the last quarter of each run, seed by seed."""
    rows = [["reward", "seed", "reward of an episode", "success", "turns"]]
    for name in data["runs"][0]["runs"]:
        for run in data["runs"]:
            cells = []
            for key, form in (("reward", ".1f"), ("success", ".2f"), ("turns", ".1f")):
                values = [row[key] for row in run["runs"][name]]
                quarter = max(1, len(values) // 4)
                parts = values[:quarter], values[-quarter:]
                first, last = (sum(part) / quarter for part in parts)
                cells.append(f"{first:{form}} to {last:{form}}")
            rows.append([f"`{name}`", run["seed"], *cells])
    return table(*rows)


@block("lesson_07.json")
def lesson_07(data):
    """Accuracy, change of both likelihoods and success after each run, all seeds in a cell."""
    seeds = ", ".join(str(run["seed"]) for run in data["runs"])
    rows = [["loss", f"accuracy, seeds {seeds}", "log pi(chosen)", "log pi(rejected)",
             "success before", "after"]]
    for name in data["runs"][0]["runs"]:
        last = [run["runs"][name][-1] for run in data["runs"]]
        rows.append([name, ", ".join(f"{row['accuracy']:.2f}" for row in last),
                     *(", ".join(f"{row[side]:+.1f}" for row in last)
                       for side in ("chosen", "rejected")),
                     ", ".join(f"{run['before']:.2f}" for run in data["runs"]),
                     ", ".join(f"{run['after'][name]:.2f}" for run in data["runs"])])
    return table(*rows)


@block("lesson_08.json")
def lesson_08(data):
    """MB of each part of a step, counted / measured, of the first seed: the others have the same."""
    parts = list(data["runs"][0]["rows"]["all weights"]["counted"])
    rows = [["MB, counted / measured", *parts, "peak", "CPU seconds"]]
    for name, row in data["runs"][0]["rows"].items():
        rows.append([name, *(f"{row['counted'][part] / 1e6:,.0f} / {row[part] / 1e6:,.0f}"
                             for part in parts),
                     f"{row['peak'] / 1e6:,.0f}", f"{row['seconds']:.1f}"])
    return table(*rows)


@block("lesson_09.json")
def lesson_09(data):
    """What each run has learned, and how well its teacher reads, all seeds in a cell."""
    rows = [["run", f"right letters, seeds {seeds_of(data)}", "questions solved", "silent groups",
             "the teacher reads, at the end"]]
    for name, first in data["runs"][0]["runs"].items():
        taken = [run["runs"][name] for run in data["runs"]]
        silent = (sum(row["silent"]) / len(row["silent"]) for row in taken)
        reads = (f"{row['reads'][1]:.2f}" for row in taken if "reads" in first)
        rows.append([name, *(", ".join(f"{row[key]:.2f}" for row in taken)
                             for key in ("right", "solved")),
                     ", ".join(f"{share:.0%}" for share in silent), ", ".join(reads)])
    return table(*rows)


@block()
def metrics():
    """Every number that a run writes: a table for each place of extras/show/metrics.json."""
    from extras.show.metrics import PLACES
    lines = []
    for place, rows in PLACES.items():
        lines += [f"## {place}", "", *table(
            ["name", "unit", "what it is", "what to look for"],
            *([f"`{name}`", *row] for name, row in rows.items())), ""]
    return lines


def seeds_of(data) -> str:
    """Return the seeds of a lesson's runs, as a table shows them."""
    return ", ".join(str(run["seed"]) for run in data["runs"])


DISTILLED = {"distill": "`distill.py`", "grpo": "`grpo.py`",
             "sft": "`sft.py` on the teacher's episodes"}


def distilled(data) -> list[str]:
    """Return the table of a JSON of bench/distill.py: success, and tokens to most of the way."""
    rows = data["rows"]
    names = [name for name in DISTILLED if name in rows[0]]
    lines = [["seed", "start", "teacher", *(DISTILLED[name] for name in names)]]
    for row in rows:
        cells = []
        for name in names:
            tokens = row[name]["tokens_to_80"]
            way = f"{tokens / 1000:.0f} k" if tokens else "not reached"
            cells.append(f"{row[name]['success']:.2f} ({way})")
        lines.append([row["seed"], f"{row['start']:.2f}", f"{row['teacher']:.2f}", *cells])
    return table(*lines)


@block("distill.json")
def distill(data):
    """Distillation of the tiny model."""
    return distilled(data)


@block("distill_smollm2.json")
def distill_smollm2(data):
    """Distillation of SmolLM2-135M."""
    return distilled(data)


@block("defaults.json")
def defaults(data):
    """What choices of loss, scale and KL reach, and whether they break on their way."""
    return chosen(data)


@block("defaults_smollm2.json")
def defaults_smollm2(data):
    """The same of SmolLM2-135M."""
    return chosen(data)


@block("defaults_gsm8k.json")
def defaults_gsm8k(data):
    """The same of SmolLM2-135M on GSM8K's easy set."""
    return chosen(data)


def chosen(data):
    """Return the table of a script's choices."""
    from bench.defaults import name_of
    rows = [["loss", "scale", "KL", "runs", "success after", "minus the first, run by run",
             "largest fall", "least readable", "CPU seconds"]]
    for numbers in data["summary"].values():
        changes, minus = numbers["changes"], numbers["minus_first"]
        difference = f"{minus['mean']:+.3f} ± {minus['half_width']:.3f}" if minus else ""
        rows.append([name_of(changes), changes["scale_rewards"], f"{changes['kl_coef']:g}",
                     numbers["success"]["n"], f"{numbers['success']['mean']:.3f}", difference,
                     f"{numbers['largest_fall']:.2f}", f"{numbers['least_readable']:.2f}",
                     f"{numbers['cpu_seconds']:.0f}"])
    return table(*rows)


@block("judge.json")
def judge(data):
    """What a judge's verdicts teach beside the environment's reward, and what they cost."""
    from bench.judge import table as lines
    return table(*lines(data))


@block("lesson_01.json")
def lesson_01(data):
    """What a baseline does to the gradient's variance and to learning, seed by seed."""
    rows = [["seed", "variance left: mean", "group's mean", "best constant",
             "last reward: none", "mean", "group's mean"]]
    for run in data["runs"]:
        noise, final = run["noise"], run["final"]
        left = [f"{noise[name][0] / noise['none'][0]:.2f}" for name in ("mean", "group", "best")]
        rows.append([run["seed"], *left, *(f"{final[name]:.2f}" for name in final)])
    return table(*rows)


@block("lesson_02.json")
def lesson_02(data):
    """Success on held-out equations before and after the lesson, and its silent groups."""
    rows = [["seed", "before", "after", "silent groups, first half", "second half"]]
    for run in data["runs"]:
        half, groups = run["steps"] // 2, run["groups"]
        silent = [row["silent"] for row in run["log"]]
        shares = [sum(part) / len(part) / groups for part in (silent[:half], silent[half:])]
        rows.append([run["seed"], f"{run['before']:.2f}", f"**{run['after']:.2f}**",
                     *(f"{share:.0%}" for share in shares)])
    return table(*rows)


@block("lesson_03.json")
def lesson_03(data):
    """Success of the last third, its share of ratios outside the clip's range before each first
    update, largest ratio and last entropy, run by run, all seeds in a cell."""
    rows = [["run", f"success, seeds {seeds_of(data)}", "outside before the first update",
             "largest ratio", "entropy at the end"]]
    for name in data["runs"][0]["success"]:
        before = []
        for run in data["runs"]:
            last = run["runs"][name][-max(1, run["steps"] // 3):]
            before.append(sum(row["outside_before"] for row in last) / len(last))
        rows.append([name, ", ".join(f"{run['success'][name]:.2f}" for run in data["runs"]),
                     ", ".join(f"{share:.1%}" for share in before),
                     ", ".join(f"{run['largest'][name]:.3g}" for run in data["runs"]),
                     ", ".join(f"{run['runs'][name][-1]['entropy']:.2f}" for run in data["runs"])])
    return table(*rows)


@block("lesson_04.json")
def lesson_04(data):
    """Reward, success and KL of the last third, by kl_coef, all seeds in a cell."""
    rows = [["`kl_coef`", f"reward, seeds {seeds_of(data)}", "success", "KL, nats a token"]]
    for kl_coef in data["runs"][0]["final"]:
        rows.append([kl_coef, *(", ".join(f"{run['final'][kl_coef][key]:{form}}"
                                          for run in data["runs"])
                                for key, form in (("reward", ".2f"), ("success", ".2f"),
                                                  ("kl", ".3f")))])
    return table(*rows)


@block("lesson_04.json")
def lesson_04_estimators(data):
    """Bias and noise of the estimators, as numbers and as gradients, of the first seed."""
    rows = [["estimator", "bias", "noise", "gradient: size", "cosine with the KL's", "noise"]]
    for name, row in data["runs"][0]["estimators"].items():
        cosine = f"{row['cosine']:.3f}" if row["size"] > 1e-6 else "none"
        rows.append([name, f"{row['bias']:+.4f}", f"{row['noise']:.3f}", f"{row['size']:.3f}",
                     cosine, f"{row['gradient_noise']:.3f}"])
    return table(*rows)


@block("lesson_04.json")
def phenomenon_kl(data):
    """Bias and noise of each estimator, and its gradient against the KL's, all seeds in a cell."""
    rows = [["estimator", f"bias, seeds {seeds_of(data)}", "noise", "gradient: size",
             "cosine with the KL's"]]
    for name in ("k2", "k3", "k3_ratio"):
        taken = [run["estimators"][name] for run in data["runs"]]
        rows.append([f"`{name}`", *(", ".join(f"{row[key]:{form}}" for row in taken) for key, form
                                    in (("bias", "+.3f"), ("noise", ".2f"), ("size", ".2f"),
                                        ("cosine", ".3f")))])
    return table(*rows)


def phenomenon(effect, data):
    """The table of an effect of docs/phenomena.md."""
    from bench.phenomena import table as cells
    return table(*cells(data["rows"], effect))


for name in ("length std entropy staleness engine credit credit_clues credit_hard "
             "credit_search echo echo_hard truncation difficulty rounding forgetting "
             "engine_model staleness_model length_model entropy_model echo_code").split():
    BLOCKS[f"phenomenon_{name}"] = partial(phenomenon, name), ("phenomena.json",)
