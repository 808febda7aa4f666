"""What a checkpoint of a training run holds."""
from dataclasses import dataclass

from llm.loading import load_weights, save_model


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
