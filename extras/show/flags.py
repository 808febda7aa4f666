"""The flags of what a run shows."""
from dataclasses import dataclass

from core.config import flag


@dataclass(kw_only=True)
class ShowFlags:
    heading = "show"
    report_to: str = flag("none", "loggers of each step, separated by commas: tensorboard, wandb, "
                                  "trackio")
    record: int = flag(1, "keep the tokens' advantages, log-probabilities, entropy and gradients "
                          "of the episodes in trajectories.jsonl; 0: do not", low=0, high=1)
    show_every: int = flag(0, "steps between episodes that are printed whole, with reward and "
                              "advantages; 0: none", low=0)
