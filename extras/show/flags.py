"""The flags of what a run shows."""
from dataclasses import dataclass

from core.config import flag


@dataclass(kw_only=True)
class ShowFlags:
    heading = "show"
    report_to: str = flag("none", "loggers of each step, separated by commas: tensorboard, wandb, "
                                  "trackio")
