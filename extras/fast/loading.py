"""What loading a model does for speed: switches of the device, and attention of training."""
from functools import wraps

import torch

from core.model import choose_device
from extras.fast.attention import causal_attention
from extras.fast.processor import USED, bound_primitives


def faster(load_model):
    """Return this load_model with faster attention."""
    @wraps(load_model)
    def load(path: str, *, device: str | None = None, train: bool = True, **options):
        device = prepared_device(device, train)
        model, tokenizer = load_model(path, device=device, train=train, **options)
        speed_up(model)
        return model, tokenizer
    return load


def prepared_device(name: str | None, train: bool):
    """Return the device, after the switches that it needs before its first product."""
    device = choose_device(name)
    if device.type == "cuda":
        if device.index is not None:
            # The streams that copies and graphs ask for are those of the current device.
            torch.cuda.set_device(device)
        # Where cuDNN's attention is chosen, it compiles again for every new shape.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if train and device.type == "cpu":
        bound_primitives()
    return device


def speed_up(model):
    """Give a loaded model `causal_attention` for torch's fused one."""
    before = model.config.get_text_config()._attn_implementation
    if "products" in USED and before in ("sdpa", "packed_attention"):
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
        AttentionInterface.register("causal_attention", causal_attention)
        AttentionMaskInterface.register("causal_attention", sdpa_mask)
        model.set_attn_implementation("causal_attention")
