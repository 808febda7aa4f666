"""Checkpoints of runs that train nothing."""
import torch


class Tokenizer:
    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


def weights(folder):
    from safetensors.torch import save_file
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")


def training(run, save_weights=weights, optimizer=None):
    """Give a run what its checkpoints are made of, in place of a model. Returns the tokenizer and the optimizer."""
    run.save_weights, run.load_weights = save_weights, lambda folder: None
    return Tokenizer(), optimizer or torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


def load(run, total, **options):
    """Load as a training loop does. Returns its steps."""
    return range(run.load(None, *training(run, **options), total), total)


def save(run, step, *args, **options):
    """Save as the training loop does after a step, and return the path. See `training`."""
    run.tokenizer, run.optimizer = training(run, *args, **options)
    run.step, run.marks = step, run.files.log_sizes()
    run.saved = None  # the same step may be saved twice
    run.save()
    return run.folder / "checkpoints" / f"step_{step:06d}"
