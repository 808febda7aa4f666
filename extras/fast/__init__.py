"""The same numbers in less time, but for rounding. No equation changes.

    fused.py, beside.py  the forward pass of Llama, Qwen2 and Qwen3 in few kernels, for the rollout
    attention.py         attention over long prompts, on a GPU, and in an update on a CPU
                         (products.py: in 16 bits)
    static_engine.py     decode steps that become CUDA graphs
    sampling.py          sampling in pieces of the batch; top-k and top-p
    loading.py           attention of a loaded model, and switches of the device
    processor.py         the default of --dtype, and freed memory given back
    order.py             which episodes share a forward pass

`faster` and `make_engine` wrap core's load_model and make_engine. `speed_up` is for a model that
is loaded already.
"""
from functools import partial

import core.config
import core.engine
from core.engine import StockForward
from extras.fast.attention import fast_row_attention
from extras.fast.fused import Fused, fits
from extras.fast.loading import faster, speed_up
from extras.fast.processor import USED, best_dtype
from extras.fast.sampling import sample

__all__ = ["faster", "make_engine", "speed_up"]

core.config.CHANGED["dtype"] = {"default": best_dtype}


def make_engine(model, *, tokens: int, make=core.engine.make_engine, static: bool | None = None,
                top_k: int = 0, top_p: float = 1.0, **options):
    """Return the engine of `make` with a faster forward pass, and on a GPU with static decoding.

    Args:
        tokens: of the longest row. The static engine has room for them from the first step on, so
            that no graph has to be captured again.
        make: core's function, or what another layer makes of it.
        static: True or False overrides the choice of decode steps that are CUDA graphs.
        top_k, top_p: cut the distribution, for chat and evaluation.
        options: those of core's `make_engine`.
    """
    if static is None:
        static = model.device.type == "cuda" and "kind" not in options
    if static:
        from extras.fast.static_engine import StaticEngine  # what a GPU needs
        options["kind"] = partial(StaticEngine, tokens=tokens)
    if not options.get("decoder"):
        fused = "fused" in USED and fits(model)
        options["decoder"] = Fused(model) if fused else StockForward(model, fast_row_attention)
    return make(model, tokens=tokens, draw=partial(sample, top_k=top_k, top_p=top_p), **options)
