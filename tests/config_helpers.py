"""A config with a flag of every kind, for the tests of flags and of the output folder."""
import dataclasses

from core.config import flag


@dataclasses.dataclass
class Config:
    model_path: str = flag("tiny", "tiny, a hub id or a folder")
    reference: str | None = flag(None, "the reference policy")
    learning_rate: float = flag(1e-5, "AdamW step size", above=0)
    lora_dropout: float = flag(0.0, "probability", low=0, high=1)
    group_size: int = flag(8, "episodes per task", aliases=("samples_per_prompt",), low=2)
    batch_size: int = flag(4, "sequences in one forward", low=1)
    gradient_accumulation_steps: int | None = flag(None, "forwards of an update", low=1)
    max_steps: int | None = flag(None, "optimizer steps", low=1)
    loss: str = flag("grpo", "objective", choices=("grpo", "dapo", "gspo"))
    load_in_4bit: bool = flag(False, "4-bit base weights")
    shuffle: bool = flag(True, "shuffle the tasks")
    seed: int = flag(0, "seed of everything random", low=0)
    output_dir: str = flag("runs/a", "folder")
    overwrite: bool = flag(False, "replace the run in output_dir")
    offset: float = flag(0.0, "any number")
    resume: bool = flag(False, "continue")
