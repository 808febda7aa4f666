"""An update in few kernels: a GPU of CUDA waits for launches, 20 to 50 microseconds each.

    adapters.py    merged together; their casts and gradients at once; those of one input together
    pointwise.py   a norm as one kernel, and one product for the adapters of gate and up
    attention.py   RoPE in 6 kernels

AdamW is its fused kernel. Log-probabilities and gradients are core's to rounding. The layer changes
what extras/memory has made and needs it. `--few_launches false` leaves all as it was. Kernels were
counted (bench/launches.py), on tensors without numbers and on a CPU that plays a GPU. On a card
`python bench/gpu.py --parts correct update` compares both.
"""
from dataclasses import dataclass
from functools import wraps

from core.config import flag
from core.model import choose_device, facts
from extras.memory.techniques import techniques_of
from extras.presence import has
from lora import Adapter


@dataclass(kw_only=True)
class LaunchFlags:
    heading = "memory"
    few_launches: bool = flag(True, "on a GPU of CUDA: adapters, norms, RoPE and AdamW of an "
                                    "update in a third of the kernels")


def with_few_launches(load_model):
    """Return this load_model with updates of few kernels on a GPU of CUDA."""
    @wraps(load_model)
    def load(path: str, *, few_launches: bool = True, device: str | None = None,
             kind: type = Adapter, **options):
        """Return (model, tokenizer) as `load_model` does.

        few_launches: False leaves the model as the other layers have made it.
        """
        if not few_launches or choose_device(device).type in ("cpu", "mps"):
            return load_model(path, device=device, kind=kind, **options)
        # A CPU loads none of this.
        from extras.launches import adapters, pointwise
        if kind is Adapter:
            kind = adapters.Fast
        model, tokenizer = load_model(path, device=device, kind=kind, **options)
        chosen = techniques_of(model)
        facts(model).fused_adamw = model.device.type == "cuda" or None
        if chosen.adamw_on_host:
            # Small and stream give time for memory, and their adapters are not on the GPU.
            return model, tokenizer
        adapters.launch_together(model)
        if has("fast"):
            from extras.launches import attention  # it calls the attention of extras/fast
            attention.install(model)
        if chosen.recompute_pointwise and not chosen.mlp_tokens:
            pointwise.install(model)
        return model, tokenizer
    return load
