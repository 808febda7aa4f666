"""--report_to: a run in TensorBoard, Weights & Biases and trackio.

A logger gets each step's numbers as train/NAME, evaluations as eval/NAME (of the policy before that
step; the last one at the step after the last), the flags as its config, and, where it has tables,
the first episodes of a step as "completions". TensorBoard reads RUN/tensorboard; wandb asks for a
login, or WANDB_MODE=offline. Projects are called agentic-rl (WANDB_PROJECT, TRACKIO_PROJECT).
"""
import json
import os
import re
from importlib.util import find_spec

from core.config import UserError, first_line, options, say
from core.data import is_finite, json_value
from core.run import LOGGED_EPISODES
from envs.transcripts import transcript

# {our name: TRL's}, of numbers that are counted alike.
USUAL = {
    "seconds": "step_time", "sampled_tokens": "completions/mean_length",
    "truncated": "completions/clipped_ratio", "actions": "tools/call_frequency",
    "tool_errors": "tools/failure_frequency", "groups_without_signal": "frac_reward_zero_std",
    "clip_low": "clip_ratio/low_mean", "clip_high": "clip_ratio/high_mean",
    "sampler_gap": "sampling/sampling_logp_difference/mean",
    "importance_weight": "sampling/importance_sampling_ratio/mean",
    "accuracy": "rewards/accuracies", "margin": "rewards/margins",
    "reward/chosen": "rewards/chosen", "reward/rejected": "rewards/rejected",
    "logprobs/chosen": "logps/chosen", "logprobs/rejected": "logps/rejected"}


# A logger takes a run that has its folder, and the config. It returns log(numbers, step=), finish()
# and the class of its tables or None. A resumed run continues what it had begun.
def to_tensorboard(run, config):
    from torch.utils.tensorboard import SummaryWriter
    # What was logged after the last checkpoint is hidden.
    writer = SummaryWriter(run.folder / "tensorboard", purge_step=run.step or None)
    writer.add_text("config", f"```\n{json.dumps(config, indent=1)}\n```")

    def log(numbers, step):
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close, None


def to_wandb(run, config):
    import wandb
    ids = [path.name.rpartition("-")[2] for path in run.folder.glob("wandb/*run-*-*")]
    known = {"id": ids[0], "resume": "allow"} if run.step and ids else {}
    project = os.environ.get("WANDB_PROJECT", "agentic-rl")
    opened = wandb.init(project=project, name=run.folder.name, config=config, dir=run.folder,
                        **known)
    return opened.log, opened.finish, wandb.Table


def to_trackio(run, config):
    import trackio
    project = os.environ.get("TRACKIO_PROJECT", "agentic-rl")
    opened = trackio.init(project=project, name=run.folder.name, config=config, embed=False,
                          resume="allow" if run.step else "never")
    return opened.log, opened.finish, trackio.Table


LOGGERS = {"tensorboard": to_tensorboard, "wandb": to_wandb, "trackio": to_trackio}


class Reports:
    """The loggers that --report_to names, as a listener and an ending of a run."""

    def __init__(self, names: str):
        """Look for the packages, before a model is loaded. Raises UserError."""
        self.names = names.split(",")
        if not LOGGERS.keys() >= set(self.names):
            raise UserError(f"--report_to {names}: give none, or some of {', '.join(LOGGERS)}")
        for name in self.names:
            if not find_spec(name):
                raise UserError(f"--report_to {name}: is not installed; pip install {name}")

    def begin(self, run):
        """Begin to log a run that knows its first step. Raises UserError."""
        self.run, self.loggers = run, {}
        config = {name: getattr(run.config, name) for name in options(type(run.config))}
        config = json_value({"algorithm": run.algorithm, **config})
        for name in self.names:
            try:
                self.loggers[name] = LOGGERS[name](run, config)
            except Exception as error:
                raise UserError(f"--report_to {name}: {first_line(error)}") from error
        run.listeners.append(self.log_step)
        run.endings.append(self.finish)

    def log_step(self, step, metrics, timing):
        """Log a step's line, and at the first one what was evaluated before it."""
        before = self.run.before if step == 0 else {}
        self.send(step, metrics | timing | as_evaluated(before), self.run.episodes)

    def finish(self, folder):
        """Log what was evaluated after the last step, and close the loggers."""
        self.send(self.run.step, as_evaluated(self.run.after), [], is_last=True)

    def send(self, step, numbers, episodes, is_last=False):
        """Log numbers and episodes of a step. A logger that fails is left out, and ends no run."""
        rows = [[step, transcript(t.to_json()), t.reward, t.info["success"], t.stop_reason]
                for t in episodes[:LOGGED_EPISODES]]
        for name, (log, finish, table) in list(self.loggers.items()):
            try:
                shown = usual(numbers)
                if rows and table:
                    columns = ["step", "episode", "reward", "success", "stop_reason"]
                    shown["completions"] = table(columns=columns, data=rows)
                log(shown, step=step)
                if is_last:
                    finish()
            except Exception as error:
                say(f"note: {name} logs no more: {first_line(error)}")
                del self.loggers[name]


def as_evaluated(metrics: dict) -> dict:
    """Return what an evaluation returned under the names of metrics.jsonl."""
    return {f"eval/{name}": value for name, value in metrics.items()}


def usual(numbers: dict) -> dict:
    """Return the finite numbers of a line under the names that loggers show them by."""
    shown = {}
    for name, value in json_value(numbers).items():
        room = "eval" if name.startswith("eval/") else "train"
        name = name.removeprefix("eval/")
        name = USUAL.get(name) or re.sub("^reward/(.+)", r"rewards/\1/mean", name)
        if is_finite(value):
            shown[f"{room}/{name}"] = value
    return shown
