"""Attention while decoding, over the KV cache, and in an update, over whole sequences."""
from functools import partial
from types import SimpleNamespace

import torch
from torch.nn import functional as F

from core.engine import row_attention
from core.packing import packed_attention
from extras.fast.processor import give_back_memory

TRIM_LAYERS = 8  # on a CPU, freed memory goes back to the system every so many layers
MOST_SCORES = 2**28  # attention scores at once of a pass over prompts that `row_attention` does
LONG_PROMPT = 512  # tokens; below, two products are as fast on a CPU
MAX_SCORES = 2**25  # bytes of one row's; with more the stock kernel does it, which keeps none


def fast_row_attention(module, query, key, value, attention_mask, scaling=None,
                       sliding_window=None, row_cache=None, softcap=None, s_aux=None, **_):
    """What core's `row_attention` computes, by torch's fused kernel where that is faster.

    On a GPU it always is. On a CPU it is for many first tokens, which see only each other: the
    causal kernel keeps no scores.
    """
    R, H, C, D = query.shape
    plain = softcap is None and s_aux is None
    causal = plain and LONG_PROMPT < C <= (sliding_window or C) and row_cache.begins
    if causal:
        bias = None
        key, value = key[:, :, :C], value[:, :, :C]
    else:
        bias = row_cache.bias(sliding_window, query.dtype)  # (R, 1, C, S)
        if not (plain and row_cache.sdpa):
            return in_parts(query, key, value, bias, scaling, softcap, s_aux), None
    groups = H // key.shape[1]
    # The heads of one key are stacked as its query rows, or it is repeated for those of a prompt.
    if C > 1:
        key = key.repeat_interleave(groups, 1)
        value = value.repeat_interleave(groups, 1)
        groups = 1
    stacked = query.reshape(R, H // groups, groups * C, D)
    out = F.scaled_dot_product_attention(
        stacked, key, value, bias, is_causal=causal, scale=scaling)
    return out.reshape(R, H, C, -1).transpose(1, 2).contiguous(), None


def in_parts(query, key, value, bias, *options):
    """Return core's `row_attention` with this bias (R, 1, C, S), MOST_SCORES at once."""
    R, H, C, _ = query.shape
    if C > 1 and R * H * C * key.shape[2] > MOST_SCORES:
        halves = zip(query.chunk(2, 2), bias.chunk(2, 2))
        return torch.cat([in_parts(q, key, value, b, *options) for q, b in halves], 1)
    cache = SimpleNamespace(bias=lambda window, dtype: bias)
    scaling, softcap, s_aux = options
    return row_attention(None, query, key, value, None, scaling, None, cache, softcap, s_aux)[0]


def causal_attention(module, query, key, value, attention_mask, scaling=None, shared_prefix=None,
                     **kwargs):
    """The attention of a model after `speed_up`, in the signature of transformers.

    It is the stock kernel except in two cases.

    shared_prefix (P, R): the batch is one packed row [prefix, row 1 ... row R] of
    `packing.hidden_states`. Each row sees the prefix and itself.

    In 16 bits on a CPU it is `products.causal`; in float32 the stock kernel takes half of its time
    (bench/attention.py). It is so without gradients too: a layer that runs again, and a policy that
    is scored, round as in the update. Otherwise the KL divergence from a policy to itself would not
    be 0, and AdamW makes whole steps of such noise. The stock kernel still does what has a mask or
    a bias, and rows of which one alone has more than 32 MiB of scores.
    """
    # A layer that has chosen the keys hands its choice over, which no kernel here heeds.
    if any(kwargs.get(name) is not None for name in ("indices", "block_indices")):
        raise NotImplementedError("it chooses the keys that a token sees (sparse attention)")
    H, T = query.shape[1:3]
    visible = key.shape[2]  # keys of a row's last query
    if shared_prefix:
        attention_mask = None
        P, R = shared_prefix
        W = (T - P) // R
        T, visible = max(P, W), P + W
    stock = attention_mask is not None or kwargs.get("position_bias") is not None
    row_bytes = H * T * visible * query.element_size()  # of the scores of one row
    trains_on_cpu = query.is_cpu and torch.is_grad_enabled()
    takes_products = query.is_cpu and query.element_size() == 2
    if not takes_products or row_bytes > MAX_SCORES or stock:
        attend = partial(stock_attention, module, attention_mask, scaling=scaling,
                         shared_prefix=shared_prefix, **kwargs)
    else:
        from extras.fast.products import causal, packed  # most runs on a CPU are in float32
        attend = partial(packed, scaling, P, R) if shared_prefix else partial(causal, scaling)
    # What layers free between tensors that they keep is a hole in glibc's heap: a fifth of
    # SmolLM2's peak. To look for holes takes 2 ms, and to fetch the pages again a quarter of the
    # tiny model's step: too long for every layer, or before the first, where none is kept yet.
    # It is done here because a hook of the layer would keep the fused decoder from being used.
    layer = getattr(module, "layer_idx", None)
    if trains_on_cpu and layer is not None and layer % TRIM_LAYERS == TRIM_LAYERS // 2:
        give_back_memory()
    return attend(query, key, value), None  # (B, T, H, D)


def stock_attention(module, mask, query, key, value, **kwargs):
    """Attend by transformers' kernel, as core's `packed_attention` does: (B, T, H, D)."""
    groups = query.shape[1] // key.shape[1]
    if mask is None and groups > 1 and not shares_keys(query):
        key = key.repeat_interleave(groups, 1)
        value = value.repeat_interleave(groups, 1)
        # A module that does not say how many query heads share a key: transformers repeats none.
        module = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
    return packed_attention(module, query, key, value, mask, **kwargs)[0]


def shares_keys(query) -> bool:
    """True if a fused kernel of torch lets query heads share keys where there is no mask.

    On a GPU that is flash attention alone: 16 bits, compute capability 8 (torch 2.6 to 2.13). In
    its place torch would take the math kernel, which keeps (B, H, T, T) weights in float32.
    """
    if query.is_cpu:
        return True
    before_ampere = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
    return query.dtype != torch.float32 and not before_ampere
