"""What this project knows about a model beyond its weights."""
from dataclasses import dataclass


@dataclass
class Facts:
    """Stands at `model.facts` once it was asked for by `facts(model)`.

    Attributes:
        source: the base model's folder, its hub id, or "tiny".
        seed: the seed of the tiny model's random weights.
        shares_prefix: True if rows that begin alike may go through as one packed row.
        refuses_graphs: True if a decode step of this model could not become a CUDA graph.
    """
    source: str = ""
    seed: int = 0
    shares_prefix: bool = False
    refuses_graphs: bool = False


def facts(model) -> Facts:
    """Return the facts about this model: the default ones if `load_model` did not make it."""
    if not hasattr(model, "facts"):
        model.facts = Facts()
    return model.facts
