"""Checkpoints of runs that train nothing, and the tiny model in a folder."""
from pathlib import Path

import torch

import core.run
from core.model import checkpoints, load_weights, save_model
from core.tiny import make_tiny


def newest_checkpoint(output_dir):
    return next(reversed(checkpoints(output_dir)), None)


class Tokenizer:
    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


def weights(folder):
    from safetensors.torch import save_file
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")


class Model:
    """What core/run.py saves as one: `write(folder)` writes its files, and it reads none."""

    def __init__(self, write):
        self.write = write

    def num_parameters(self, only_trainable=False):
        return 2


core.run.save_model = lambda model, folder: model.write(Path(folder)) if isinstance(model, Model) else save_model(model, folder)
core.run.load_weights = lambda model, folder: isinstance(model, Model) or load_weights(model, folder)


def training(save_weights=weights, optimizer=None):
    """Return what checkpoints are made of: a model, a tokenizer and an optimizer."""
    return Model(save_weights), Tokenizer(), optimizer or torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


def load(run, total, **options):
    """Load as a training loop does. Returns its steps."""
    return range(run.load(*training(**options), total), total)


def save(run, step, *args, **options):
    """Save as the training loop does after a step, and return the path. See `training`."""
    run.model, run.tokenizer, run.optimizer = training(*args, **options)
    run.step, run.saved = step, None  # the same step may be saved twice
    run.save()
    return run.folder / "checkpoints" / f"step_{step:06d}"


def save_tiny(folder) -> str:
    """Write the tiny model and its tokenizer into a folder."""
    for saved in make_tiny():
        saved.save_pretrained(folder)
    return str(folder)
