"""What a checkpoint of a training run holds."""
from dataclasses import dataclass

from llm.loading import load_weights, save_model


@dataclass
class TrainingState:
    """What the next step depends on: the policy's weights, its tokenizer, the optimizer's moments."""

    model: object
    tokenizer: object
    optimizer: object

    def save_weights(self, folder):
        """Write what trains into `folder`: the adapter in PEFT's format, or all weights."""
        save_model(self.model, folder)

    def load_weights(self, folder):
        """Read back what `save_weights` wrote, bit for bit."""
        load_weights(self.model, folder)
