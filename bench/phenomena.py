"""Effects that people argue about, each seen alone: the measurements of docs/phenomena.md.

    python bench/phenomena.py                                      all of it: an hour of CPU time
    python bench/phenomena.py --effects length,std --seeds 0       some effects, one seed
    python bench/phenomena.py --effects credit --seconds 300       begin no run after five minutes

Most effects are shown on policies of a few numbers (toys.py, games.py), in seconds. The others
train the tiny model by grpo.py, from one taught base for each environment, as the lessons do. All
arms of a seed see the same tasks, so that differences are taken seed by seed. Each run is kept in
results/phenomena.json as it ends: what is there already is not run again.
"""
import argparse
import datetime
import json
import sys
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.learning import (  # noqa: E402
    RESULTS, constants, fingerprint, processor, series, spread)
from bench import games, toys  # noqa: E402
from bench.pictures import COLORS, figure, save  # noqa: E402

TOYS = toys.TOYS | games.GAMES
CLUES = f"{ROOT / 'bench' / 'clues.py'}:Clues"
EASY_CODE = f"{ROOT / 'bench' / 'easy_code.py'}:EasyCode"
# The taught models: the environment that each was taught on, demonstrations, steps of SFT.
BASES = {"easy": ("equations", 1400, 300), "clues": (CLUES, 400, 220),
         "hard": ("equations_hard", 1400, 300), "search": ("search", 1400, 300),
         "poor": ("search", 300, 120), "poor_hard": ("equations_hard", 300, 120),
         "poor_code": (EASY_CODE, 300, 250)}
NOISE, MAX_TURNS = 0.6, 6  # of the experts: the share of actions that are wrong, the most turns
SCHOOL_BATCH, SCHOOL_RATE = 16, 3e-3
STEPS, GAMMA = 20, 0.95
TRAINING = {"tasks_per_step": 4, "group_size": 8, "updates_per_step": 2, "learning_rate": 2e-3,
            "max_grad_norm": 0.05, "kl_coef": 0.1, "lora_r": 16, "batch_size": 16,
            "weight_decay": 0.0, "dtype": "float32", "loss": "grpo", "credit": "episode",
            "scale_rewards": "group", "clip_eps_low": 0.2, "clip_eps_high": 0.2}
EXAM_TASKS, EXAM_SAMPLES = 80, 2
METRICS = ("success", "reward", "structure", "echo", "entropy", "clip_high", "sampler_gap", "turns",
           "truncated", "grad_norm", "groups_without_signal", "importance_weight",
           "importance_left_out", "approx_kl", "kl")

# Of each effect that is seen on the tiny model: base, environment, and the arms. An arm is what it
# changes of TRAINING; "rollout" says who samples, the policy so many steps ago or an engine of
# another dtype, and "gamma" is gigpo's discount. An arm "like" another one is that run.
FOUR_UPDATES = {"updates_per_step": 4, "kl_coef": 0.0}
ECHO = {"no echo": {}, "echo 0.01": {"echo_coef": 0.01}, "echo 0.1": {"echo_coef": 0.1}}
CORRECTIONS = {
    "": {}, ", corrected": {"importance_correction": 2.0},
    ", sequence mask": {"importance_correction": 3.0, "importance_mode": "sequence_mask"},
    ", geometric mask": {"importance_correction": 1.01, "importance_mode": "geometric_mask"}}
MODELS = {
    "credit_clues": ("clues", CLUES, {
        "episode": {"credit": "episode"}, "process": {"credit": "process"},
        "gigpo": {"credit": "gigpo"}, "gigpo, not discounted": {"credit": "gigpo", "gamma": 1.0},
        "gigpo, no std": {"credit": "gigpo", "scale_rewards": "none"}}),
    "engine_model": ("easy", "equations", {
        "float32": {}, "bfloat16": {"rollout": "bfloat16"}, "float8": {"rollout": "float8"},
        "float8, corrected": {"rollout": "float8", "importance_correction": 2.0}}),
    "staleness_model": ("easy", "equations", {
        "new": {"like": "engine_model float32"},
        **{f"age {age}{name}": {"rollout": age, **changes}
           for age in (2, 4, 8) for name, changes in CORRECTIONS.items()}}),
    "length_model": ("easy", "equations", {
        "grpo": {"like": "engine_model float32"}, "dr_grpo": {"loss": "dr_grpo"}}),
    "entropy_model": ("easy", "equations", {
        "clip 0.2": FOUR_UPDATES, "clip-higher 0.28": {**FOUR_UPDATES, "clip_eps_high": 0.28},
        "no upper clip": {**FOUR_UPDATES, "clip_eps_high": 1e9}}),
    "credit_hard": ("hard", "equations_hard", {
        name: {"credit": name} for name in ("episode", "process", "gigpo", "turn")}),
    "credit_search": ("search", "search", {
        name: {"credit": name} for name in ("episode", "process", "gigpo", "turn")}),
    "echo": ("poor", "search", ECHO), "echo_hard": ("poor_hard", "equations_hard", ECHO),
    "echo_code": ("poor_code", EASY_CODE, ECHO),
}


# ------------------------------------------------------------------------------ the taught models
def imitate(model, episodes, seed, steps):
    """Train what trains of the model on demonstrations."""
    from torch.nn.utils import clip_grad_norm_
    from core.data import batches_of_like_length, collate
    from core.logprobs import token_logprobs
    from core.model import adamw, scheduled
    optimizer = adamw(model, lr=SCHOOL_RATE)
    model.train()
    batches = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = scheduled(SCHOOL_RATE, step, steps)
        batches = batches or batches_of_like_length(episodes, SCHOOL_BATCH, seed, step)
        token_ids, mask, _ = collate(batches.pop(), model.device)  # (B, T) each
        logprobs, _ = token_logprobs(model, token_ids, mask)  # (B, T)
        (-(logprobs * mask).sum() / mask.sum()).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def demonstrations(tokenizer, env, n, seed, noise):
    """Return n episodes of a scripted expert, of whose actions a share `noise` is wrong."""
    from core.config import mix
    from envs import Limits, recommended
    from envs.tasks import load_tasks
    from schooling import demonstrate
    tasks = load_tasks(env, "train", n, seed)
    for i, task in enumerate(tasks):
        task.update(noise=noise, noise_seed=mix(seed, "train", i))
    limits = Limits(**recommended(env) | {"max_turns": MAX_TURNS})
    episodes = demonstrate(tokenizer, env, tasks, limits)
    return [t for t in episodes if len(t.token_ids) <= limits.max_tokens]


def base(args, name) -> str:
    """Return the folder of a taught model, the same for all seeds; teach it if it is not there."""
    from core.model import share_weights
    from layers import load_model
    folder = Path(args.out) / f"base_{name}"
    if not folder.exists():
        model, tokenizer = load_model("tiny")
        env, n, steps = BASES[name]
        if args.school_steps is not None:
            steps = args.school_steps
        imitate(model, demonstrations(tokenizer, env, n, 0, NOISE), 0, steps)
        unfinished = folder.with_name(f".tmp-{folder.name}")
        for thing in (model, tokenizer):
            thing.save_pretrained(unfinished)
        share_weights(unfinished)
        unfinished.rename(folder)
    return str(folder)


# ---------------------------------------------------------------------------------- who samples
def other_engine(folder, form):
    """Return a `rollout` that samples with a bfloat16 model, whose weights `form` may round more.

    It gets the trainer's merged weights before each rollout, as a server would.
    """
    import torch
    from agent import rollout
    from layers import load_model
    from lora import merged
    sampler, _ = load_model(folder, dtype="bfloat16", train=False)

    def sampled_elsewhere(model, *arguments, **options):
        with merged(model):
            weights = dict(model.named_parameters())
            for name, p in sampler.named_parameters():
                new = weights[name].data
                if form == "float8" and new.dim() > 1:
                    new = new.to(torch.float8_e4m3fn).float()
                p.data.copy_(new)
        return rollout(sampler, *arguments, **options)
    return sampled_elsewhere


def rollout_by(who, folder):
    """Return the function that plays the training episodes of an arm."""
    from agent import rollout
    from bench.staleness import rollout_of
    if who is None:
        return rollout
    return rollout_of(who) if isinstance(who, int) else other_engine(folder, who)


# ------------------------------------------------------------------------------------------- a run
def exam(model, tokenizer, env, args) -> float:
    """Return the share of held-out tasks that are solved."""
    from agent import evaluate
    from envs import Limits, recommended
    from envs.tasks import load_tasks
    tasks = load_tasks(env, "test", args.exam_tasks, 0)
    limits = Limits(**recommended(env))
    return evaluate(model, tokenizer, env, tasks, EXAM_SAMPLES, limits=limits)["success"]


def lengths(folder) -> dict:
    """Return the mean sampled tokens of wrong and of right episodes, in the last half of a run."""
    lines = (Path(folder) / "trajectories.jsonl").read_text().splitlines()
    episodes = [json.loads(line) for line in lines[len(lines) // 2:]]
    found = {}
    for words, solved in (("wrong", False), ("right", True)):
        counts = [sum(t["loss_mask"]) for t in episodes if t["info"]["success"] == solved]
        if counts:
            found[f"{words} answers"] = sum(counts) / len(counts)
    return found


def train(args, effect, arm, seed) -> dict:
    """Train the tiny model as an arm of an effect says, and return its row."""
    import grpo
    from layers import load_model
    base_name, env, arms = MODELS[effect]
    changes = dict(arms[arm])
    start = base(args, base_name)
    began = time.process_time()
    folder = Path(args.out) / f"{effect}_{arm}_{seed}".replace(" ", "_")
    grpo.rollout = rollout_by(changes.pop("rollout", None), start)
    grpo.CREDITS["gigpo"] = partial(grpo.CREDITS["gigpo"], gamma=changes.pop("gamma", GAMMA))
    grpo.train(grpo.Config(**TRAINING | changes, model_path=start, env=env, seed=seed,
                           output_dir=str(folder), max_steps=args.steps, eval_tasks=0,
                           show_every=0, overwrite=True))
    model, tokenizer = load_model(str(folder), train=False)
    row = {name: series(folder, name) for name in METRICS} | lengths(folder)
    row["cpu_seconds"] = round(time.process_time() - began, 1)
    return row | {"solved": exam(model, tokenizer, env, args)}


def start_row(args, base_name) -> dict:
    """Return what a taught model solves before any other training."""
    from layers import load_model
    model, tokenizer = load_model(base(args, base_name), train=False)
    return {"solved": exam(model, tokenizer, BASES[base_name][0], args)}


# ------------------------------------------------------------------------------------ the results
def todo(effects):
    """Yield (effect, the arms of one run) in the order in which they are run."""
    for effect in effects:
        if effect in TOYS:
            yield effect, None
            continue
        base_name, _, arms = MODELS[effect]
        yield f"start_{base_name}", "start"
        for arm, changes in arms.items():
            yield (changes["like"].split(" ", 1) if "like" in changes else (effect, arm))


def run_missing(args, target):
    """Do the runs that have no row yet, and write the file after each."""
    began = time.monotonic()
    for seed in args.seeds:
        for effect, arm in todo(args.effects):
            done = read(target).get(effect, {})
            if any(str(seed) in by_seed for name, by_seed in done.items() if arm in (None, name)):
                continue
            if time.monotonic() - began > args.seconds:
                return
            if arm is None:
                new = TOYS[effect](seed)
            elif arm == "start":
                new = {arm: start_row(args, effect.removeprefix("start_"))}
            else:
                new = {arm: train(args, effect, arm, seed)}
            # Read again: another process may have written meanwhile.
            rows = read(target)
            for name, row in new.items():
                rows.setdefault(effect, {}).setdefault(name, {})[str(seed)] = rounded(row)
                scalars = {key: value for key, value in row.items() if not isinstance(value, list)}
                print(effect, name, seed, rounded(scalars), flush=True)
            write(args, rows, target)


def read(target) -> dict:
    """Return the rows that are there: effect, arm, seed."""
    return json.loads(target.read_text())["rows"] if target.exists() else {}


def rounded(row) -> dict:
    """Return the row with five digits, and a curve's last points kept."""
    return {key: [round(x, 4) for x in value] if isinstance(value, list) else float(f"{value:.5g}")
            for key, value in row.items()}


# ------------------------------------------------------------------------------ tables and pictures
# What the table of an effect shows. Its last column is the first of these minus that of the first
# arm, seed by seed.
TABLES = {
    "length": ("wrong answers", "right answers"),
    "length_model": ("solved", "wrong answers", "right answers"),
    "std": ("hard", "middle", "easy", "style"),
    "entropy": ("best action", "entropy", "clipped above"),
    "entropy_model": ("solved", "entropy", "clip_high"),
    "staleness": ("at age 8", "at age 4", "at age 2", "at the end, age 8", "left out, age 8"),
    "staleness_model": ("solved", "approx_kl", "importance_left_out"),
    "engine": ("reward", "gap", "outside gspo"),
    "engine_model": ("solved", "sampler_gap"),
    "credit": ("success", "looks", "success at a price of 0.05", "good turns in the hard place"),
    "credit_clues": ("success", "turns", "solved"),
    "credit_hard": ("success", "turns", "solved"),
    "credit_search": ("success", "turns", "solved"),
    "echo": ("reward", "success", "solved", "structure"),
    "echo_hard": ("reward", "success", "solved", "structure"),
    "echo_code": ("reward", "success", "solved", "structure"),
    "truncation": ("success", "cut", "success without the limit"),
    "difficulty": ("success after", "after 70 updates", "updates", "silent"),
    "rounding": ("kept at 1e-06", "kept at 1e-05", "kept at 1e-04", "kept at 1e-03"),
    "forgetting": ("other subject", "trained subject", "KL", "updates"),
}
# The panels of an effect's picture, for those that a page shows: its title, and the curve that it
# shows of each arm. Another axis than the share of the run is named, and its values are those of a constant of toys.py.
PANELS = {
    "length": (("tokens of a wrong answer", "curve"),),
    "std": (("chance of hard tasks", "curve"), ("chance of the style paid 0.01", "style curve")),
    "entropy": (("entropy, nats", "curve"), ("chance of the best action", "rare curve")),
    "staleness": (("reward", "curve"),),
    "engine": (("reward", "curve"),),
    "credit": (("success", "curve"), ("looks", "looks curve")),
    "credit_clues": (("success", "success"), ("turns", "turns")),
    "credit_hard": (("success", "success"), ("turns", "turns")),
    "echo_hard": (("reward", "reward"), ("success", "success")),
    "truncation": (("share of answers that are cut", "curve"),),
    "difficulty": (("mean success of all tasks", "curve"),),
    "rounding": (("share of the update that is kept", "curve", "size of a step", "RATES"),),
    "forgetting": (("success on the other subject", "curve"), ("on the trained one", "own curve")),
}


def arms_of(rows, effect) -> dict:
    """Return {arm: {seed: row}} of an effect, in the table's order, those of other effects too."""
    if effect not in MODELS:
        return rows.get(effect, {})
    base_name, _, arms = MODELS[effect]
    found = {"before": rows.get(f"start_{base_name}", {}).get("start", {})}
    for arm, changes in arms.items():
        place, name = changes["like"].split(" ", 1) if "like" in changes else (effect, arm)
        found[arm] = rows.get(place, {}).get(name, {})
    return {arm: by_seed for arm, by_seed in found.items() if by_seed}


def number(row, metric):
    """Return a number of a row, of a curve the mean of its last quarter, or None."""
    value = row.get(metric)
    if isinstance(value, list):
        last = value[-max(1, len(value) // 4):]
        value = sum(last) / len(last) if last else None
    return value


def table(rows, effect) -> list[list[str]]:
    """Return the cells of an effect's table: means over seeds, with t intervals from three on."""
    metrics, arms = TABLES[effect], arms_of(rows, effect)
    first = next((by_seed for arm, by_seed in arms.items() if arm != "before"), {})
    lines = [["", *metrics, f"{metrics[0]}, minus the first row, seed by seed"]]
    for arm, by_seed in arms.items():
        cells = []
        for metric in metrics:
            values = [number(row, metric) for row in by_seed.values()]
            cells.append("" if None in values else mean_of(values))
        seeds = sorted(by_seed.keys() & first.keys()) if arm != "before" else []
        differences = [number(by_seed[seed], metrics[0]) - number(first[seed], metrics[0])
                       for seed in seeds] if by_seed is not first else []
        cells.append(", ".join(f"{x:+.3g}" for x in differences))
        lines.append([arm, *cells])
    return lines


def mean_of(values) -> str:
    """Return "0.71 ± 0.05" of the seeds' numbers."""
    found = spread(values)
    half = f" ± {found['half_width']:.2g}" if found["n"] > 2 else ""
    return f"{found['mean']:.3g}{half}"


def draw(rows, path):
    """Draw phenomena_EFFECT.svg: a thin line for each seed, and a thick one for their mean."""
    effect = Path(path).stem.removeprefix("phenomena_")
    panels = PANELS[effect]
    picture, grid = figure(1, len(panels), width=3.4 * len(panels) + 2, height=2.6, squeeze=False)
    for panel, (title, key, *axis) in zip(grid[0], panels):
        for color, (arm, by_seed) in zip(COLORS.values(), arms_of(rows, effect).items()):
            curves = [row[key] for row in by_seed.values() if row.get(key)]
            # Runs that stop by themselves have curves of several lengths, and no mean.
            one_length = len({len(curve) for curve in curves}) == 1
            for curve in curves:
                panel.plot(places(curve, axis), curve, color=color,
                           linewidth=0.6 if one_length else 1.2, alpha=0.6)
            mean = [sum(points) / len(points) for points in zip(*curves)] if one_length else []
            if curves:
                panel.plot(places(mean, axis), mean, color=color, linewidth=1.8, label=arm)
        panel.set(title=title, xlabel=axis[0] if axis else "share of the run",
                  xscale="log" if axis else "linear")
    grid[0][-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    save(picture, path)


def places(curve, axis) -> list[float]:
    """Return where the points of a curve stand: from 0 to 1, or at the values of its axis."""
    if axis:
        return list(getattr(toys, axis[1]))[:len(curve)]
    return [i / max(1, len(curve) - 1) for i in range(len(curve))]


def draw_all(rows, folder):
    """Draw every picture whose effect has rows."""
    for effect in PANELS:
        if arms_of(rows, effect):
            draw(rows, Path(folder) / f"phenomena_{effect}.svg")


def settings() -> dict:
    """Return what the figures depend on."""
    return {**{script: constants(script) for script in ("phenomena", "toys", "games", "clues")},
            "training": TRAINING, "bases": {name: row[1:] for name, row in BASES.items()},
            "arms": {effect: arms for effect, (_, _, arms) in MODELS.items()}}


def write(args, rows, target):
    """Write all rows, and return what was written."""
    result = {"command": "python bench/phenomena.py", "date": datetime.date.today().isoformat(),
              "machine": processor(), "settings": fingerprint(settings()), "steps": args.steps,
              "rows": rows}
    target.parent.mkdir(parents=True, exist_ok=True)
    target.with_suffix(".tmp").write_text(json.dumps(result) + "\n")
    target.with_suffix(".tmp").rename(target)
    return result


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--effects", default=",".join([*TOYS, *MODELS]))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after so many")
    parser.add_argument("--school_steps", type=int, help="default: those of BASES")
    parser.add_argument("--exam_tasks", type=int, default=EXAM_TASKS)
    parser.add_argument("--out", default=str(ROOT / "runs" / "phenomena"))
    parser.add_argument("--results", default=str(RESULTS))
    args = parser.parse_args(argv)
    args.effects = args.effects.split(",")
    args.seeds = [int(seed) for seed in args.seeds.split(",")]
    target = Path(args.results) / "phenomena.json"
    run_missing(args, target)
    draw_all(read(target), args.results)
    result = write(args, read(target), target)
    del result["rows"]  # it is long, and stands in the file
    print(json.dumps(result | {"file": str(target)}))


if __name__ == "__main__":
    main()
