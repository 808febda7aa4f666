"""Attention while decoding, over the KV cache, and in an update, over whole sequences."""
from functools import partial
from types import SimpleNamespace

import torch
from torch.nn import functional as F

from core.engine import row_attention
from core.packing import after, packed_attention, unpack
from extras.fast.processor import give_back_memory

TRIM_LAYERS = 8  # on a CPU, freed memory goes back to the system every so many layers
MOST_SCORES = 2**28  # attention scores at once of a pass over prompts that `row_attention` does
LONG_PROMPT = 512  # tokens; below, two products are as fast on a CPU
SCORES = 2**20  # bytes of attention scores at once in the training pass: a CPU's cache holds them
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

    shared_prefix (P, B): the batch is one packed row [prefix, row 1 ... row B] of
    `packing.hidden_states`. Each row sees the prefix and itself.

    In 16 bits on a CPU it is `causal_products`; in float32 the stock kernel takes half of its time
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
        P, B = shared_prefix
        W = (T - P) // B
        T, visible = max(P, W), P + W
    stock = attention_mask is not None or kwargs.get("position_bias") is not None
    row_bytes = H * T * visible * query.element_size()  # of the scores of one row
    trains_on_cpu = query.is_cpu and torch.is_grad_enabled()
    takes_products = query.is_cpu and query.element_size() == 2
    if not takes_products or row_bytes > MAX_SCORES or stock:
        attend = partial(stock_attention, module, attention_mask, scaling=scaling,
                         shared_prefix=shared_prefix, **kwargs)
    elif shared_prefix:
        attend = partial(packed_products, scaling, P, B)
    else:
        attend = partial(causal_products, scaling)
    # What layers free between tensors that they keep is a hole in glibc's heap: a fifth of
    # SmolLM2's peak. To look for holes takes 2 ms, and to fetch the pages again a quarter of the
    # tiny model's step: too long for every layer, or before the first, where none is kept yet.
    # It is done here because a hook of the layer would keep the fused decoder from being used.
    layer = getattr(module, "layer_idx", None)
    if trains_on_cpu and layer is not None and layer % TRIM_LAYERS == TRIM_LAYERS // 2:
        give_back_memory()
    return attend(query, key, value), None  # (B, T, H, D)


def packed_products(scaling, P, B, query, key, value):
    """Attend within one packed row [prefix, row 1 ... row B] (1, H or H_kv, P + B * W, D).

    Returns (1, P + B * W, H, D).
    """
    prefix, rows = zip(*(x.split([P, x.shape[2] - P], 2) for x in (query, key, value)))
    first = causal_products(scaling, *prefix)  # (1, P, H, D)
    rows = (unpack(x, B) for x in rows)
    tail = causal_products(scaling, *rows, *prefix[1:])  # (B, W, H, D)
    return torch.cat([first, tail.flatten(0, 1)[None]], 1)


def causal_products(scaling, query, key, value, *prefix):
    """Causal attention as matrix products, which computes its scores again in the backward pass.

    query (B, H, T, D), key (B, H_kv, T, D), value (B, H_kv, T, E). A prefix that all rows see is
    given as its key (1, H_kv, P, D) and value (1, H_kv, P, E). Returns (B, T, H, E).
    """
    nothing = (x[:1, :, :0].detach() for x in (key, value))
    return _CausalProducts.apply(scaling, query, key, value, *(prefix or nothing))


class _CausalProducts(torch.autograd.Function):
    """O = W V with W = softmax(scaling Q K^T + bias), whose bias hides later tokens.

    With the gradient G of O the other gradients are

        dV = W^T G      dS = W * (G V^T - rowsum(W * G V^T))      dQ = scaling dS K
                                                                  dK = scaling dS^T Q
    """

    @staticmethod
    def forward(ctx, scaling, *inputs):
        ctx.scaling = scaling
        ctx.save_for_backward(*inputs)
        query, _, value = inputs[:3]
        B, H, T, _ = query.shape
        out = query.new_empty(B, T, H, value.shape[3])
        for rows, _, _, v, weights in _weights(scaling, *inputs):
            out[rows] = (weights @ v).unflatten(2, (-1, T)).flatten(1, 2).transpose(1, 2)
        return out

    @staticmethod
    def backward(ctx, grad):
        inputs = ctx.saved_tensors
        query, key, _, prefix, _ = inputs
        P, T = prefix.shape[2], key.shape[2]
        grad_query = torch.empty_like(query)
        grad_key, grad_value = [], []
        for rows, q, k, v, weights in _weights(ctx.scaling, *inputs):
            g = grad[rows].transpose(1, 2).reshape(*q.shape[:3], -1)
            grad_value.append(weights.mT @ g)
            slope = torch.ops.aten._softmax_backward_data(g @ v.mT, weights, -1, weights.dtype)
            grad_query[rows] = (slope @ k).mul_(ctx.scaling).view_as(query[rows])
            grad_key.append(slope.mT @ q)
        (prefix_key, key), (prefix_value, value) = (
            torch.cat(grads)[:, :, :P + T].split([P, T], 2) for grads in (grad_key, grad_value))
        return (None, grad_query, key, value,
                prefix_key.sum(0, keepdim=True), prefix_value.sum(0, keepdim=True))


def _weights(scaling, query, key, value, prefix_key, prefix_value):
    """Yield, for a few rows at a time, their slice, scaling Q, K, V and W.

    The heads of Q that share a key are stacked: (b, H_kv, H / H_kv * T, D). K (b, H_kv, S, D) and
    V (b, H_kv, S, E) have the prefix in front.
    """
    B, H, T, D = query.shape
    P = prefix_key.shape[2]
    # Bfloat16's softmax takes twice as long where rows are no multiple of 32.
    spare = -(P + T) % 32 if query.element_size() == 2 else 0
    bias = query.new_full((T, P + T + spare), -torch.inf).triu_(1 + P)
    at_once = max(1, SCORES // (H * bias.nbytes))
    for start in range(0, B, at_once):
        rows = slice(start, start + at_once)
        k = F.pad(after(prefix_key, key[rows]), (0, 0, 0, spare))
        v = F.pad(after(prefix_value, value[rows]), (0, 0, 0, spare))
        q = query[rows].reshape(len(k), k.shape[1], -1, D) * scaling
        scores = q @ k.mT
        scores.unflatten(2, (-1, T)).add_(bias)
        yield rows, q, k, v, scores.softmax(-1)


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
