"""Causal attention of an update as matrix products, which compute their scores again.

In 16 bits on a CPU it is faster than torch's fused kernel (bench/attention.py).
"""
import torch
from torch.nn import functional as F

from core.packing import after, unpack

SCORES = 2**20  # bytes of attention scores at once, which a CPU's cache holds


def packed(scaling, P, R, query, key, value):
    """Attend within one packed row [prefix, row 1 ... row R] (1, H or H_kv, P + R * W, D).

    Returns (1, P + R * W, H, D).
    """
    prefix, rows = zip(*(x.split([P, x.shape[2] - P], 2) for x in (query, key, value)))
    first = causal(scaling, *prefix)  # (1, P, H, D)
    rows = (unpack(x, R) for x in rows)
    tail = causal(scaling, *rows, *prefix[1:])  # (R, W, H, D)
    return torch.cat([first, tail.flatten(0, 1)[None]], 1)


def causal(scaling, query, key, value, *prefix):
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
