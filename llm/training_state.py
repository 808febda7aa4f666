"""What a checkpoint of a training run holds, and the optimizer."""
from dataclasses import dataclass

import torch

from llm.adapter_files import load_weights, save_model
from llm.memory import techniques_of


def adamw(model, weight_decay: float = 0.0, beta2: float = 0.95, lr: float = 0.0):
    """Return AdamW over what trains in the model. `Run.steps` sets the learning rate.

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
        """Write what trains into `folder`: the adapter in PEFT's format, or all weights."""
        save_model(self.model, folder)

    def load_weights(self, folder):
        """Read back what `save_weights` wrote, bit for bit."""
        load_weights(self.model, folder)
