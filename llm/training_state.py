"""What a checkpoint of a training run holds, and the optimizer."""
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from experiment.data import reading
from llm.adapter_files import load_weights, save_model
from llm.memory import techniques_of
from lora import adapter_tensors, settings

ADDED = "added.safetensors"


def adamw(model, *, lr: float, weight_decay: float = 0.0, beta2: float = 0.95):
    """Return AdamW over what trains in the model. `Run.steps` applies the schedule to `lr`.

    A beta2 of 0.95 soon forgets the tiny first gradients of a fresh adapter. An adapter that
    `load_model` put into host memory is updated there: the device holds no adapter, gradient or
    moment.
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    # On a CPU the fused kernel is the fastest one. None lets torch choose.
    fused = techniques_of(model).adamw_on_host or None
    return torch.optim.AdamW(
        weights, lr=lr, betas=(0.9, beta2), weight_decay=weight_decay, fused=fused)


@dataclass
class TrainingState:
    """The weights, the tokenizer and the optimizer's moments, on which the next step depends."""

    model: object
    tokenizer: object
    optimizer: object

    def save_weights(self, folder):
        """Write what trains into `folder`: the adapter in PEFT's format, or all weights.

        What a fork has added to the model, a value head for instance, goes into a file of its own.
        """
        added = self._added()
        save_model(self.model, folder, leave_out=added)
        if added:
            tensors = {name: p.detach().cpu().contiguous() for name, p in added.items()}
            save_file(tensors, Path(folder, ADDED))

    def load_weights(self, folder):
        """Read back what `save_weights` wrote, bit for bit."""
        added = self._added()
        load_weights(self.model, folder, leave_out=added)
        if added:
            path = Path(folder, ADDED)
            with reading(path):
                tensors = load_file(path)
                for name, p in added.items():
                    p.data.copy_(tensors[name])

    def _added(self):
        """Return {name: parameter} of what trains and is neither the adapter nor the model's own.

        Beside an adapter, weights of the base model that train are among them.
        """
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if settings(self.model):
            adapter = {id(p) for p in adapter_tensors(self.model).values()}
            return {name: p for name, p in trained.items() if id(p) not in adapter}
        with torch.device("meta"):
            own = type(self.model)(self.model.config).state_dict()
        return {name: p for name, p in trained.items() if name not in own}
