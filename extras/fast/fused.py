"""The forward pass of the Llama family (Llama, Qwen2, Qwen3) in few kernels, for the rollout.

A layer takes 22 kernels on an H100, attention and cache included. The stock modules launch 41 to 57
without these. Every other architecture and modules with hooks stay with those, on a CPU also
4-bit weights and an adapter that is not merged. On a GPU extras/fast/beside.py joins such Linears.

It takes no memory: the joint weights replace the model's tensors, which become views of them. On
a CPU, bfloat16 weights are held in oneDNN's layout, in which a product of few rows takes 25 to
35 % less time. Merged weights are then freed. Other weights stay beside the packed ones.
"""
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from core.model import facts
from core.packing import FAMILIES
from extras.fast.attention import fast_row_attention
from extras.fast.processor import give_back_memory
from lora import SAME_NUMBERS, adapted_forward, is_adapted, weight_is_enough


def free_merged(linears):
    """Free the merged weights of these Linears, which the decoder holds in its own layout."""
    for linear in linears:
        if is_adapted(linear) and linear.lora.mode == "merged":
            linear.weight.data = linear.weight.data.new_empty(0)
            linear.forward = partial(merge_and_run, linear)


def merge_and_run(linear, x):
    """Return the output of a Linear whose merged weight may have been freed."""
    whole_weight(linear)
    return adapted_forward(linear, x)


def whole_weight(linear):
    """Return the weight of a Linear, merged again if `free_merged` has freed it."""
    if not linear.weight.numel():
        linear.lora.merge(linear)
    return linear.weight


SAME_NUMBERS.add(merge_and_run)


def fits(model) -> bool:
    """True if the fused forward applies: a supported architecture, no hooks, on a CPU `plain`."""
    config = model.config
    if config.model_type not in FAMILIES or config.hidden_act != "silu":
        return False
    return all(_as_built(module, model.device) for module in model.base_model.modules())


def _as_built(module, device) -> bool:
    """True if a module computes what its class says, a Linear with its weight on this device."""
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    if isinstance(module, nn.Linear):
        weight = module.weight
        if weight.device != device or weight.is_cpu and not plain(module):
            return False
    replaced = vars(module).get("forward")
    return not replaced or getattr(replaced, "func", None) in SAME_NUMBERS


def plain(linear) -> bool:
    """True if the output is the product with the weight: no 4 bits, adapters merged or off."""
    return type(linear) is nn.Linear and weight_is_enough(linear)


class Fused:
    """The fused forward: `fused(ids, cache)` gives hidden states, `fused.head(hidden)` logits.

    It is for the weights as they are now.
    """

    @torch.no_grad()
    def __init__(self, model):
        self.base = model.base_model
        in_tiles = getattr(facts(model).techniques, "mlp_tokens", 0)
        self.layers = [FusedLayer(layer, in_tiles) for layer in self.base.layers]
        self.head = joined(model.get_output_embeddings())
        give_back_memory()

    def __call__(self, ids, cache):
        """Return the last hidden states (R, C, D) of ids (R, C), each at its cache.position."""
        x = self.base.embed_tokens(ids)  # (R, C, D)
        cos, sin = self.base.rotary_emb(x, cache.position)  # (R, C, d)
        # The sign of RoPE's rotation goes into the sine. What is left of it is a roll.
        first, second = sin.chunk(2, -1)
        sin = torch.cat([-first, second], -1)
        for layer in self.layers:
            x = layer(x, cos[:, :, None], sin[:, :, None], cache)
        return normalize(self.base.norm, x)


class FusedLayer:
    """One decoder layer. Where its MLP goes in_tiles, that of a prompt is the layer's own."""

    def __init__(self, layer, in_tiles):
        self.attention = attention = layer.self_attn
        self.norm = layer.input_layernorm
        self.mlp_norm = layer.post_attention_layernorm
        self.qkv = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = joined(attention.o_proj)
        mlp = layer.mlp
        self.mlp = self.prompt_mlp = partial(
            fused_mlp, joined(mlp.gate_proj, mlp.up_proj), joined(mlp.down_proj))
        # The intermediate values of a long prompt would fill a small GPU.
        if in_tiles:
            self.prompt_mlp = mlp
        self.heads = attention.q_proj.out_features // attention.head_dim  # H
        self.kv_heads = attention.k_proj.out_features // attention.head_dim  # H_kv
        self.window = getattr(attention, "sliding_window", None)
        self.qk_norm = None
        if hasattr(attention, "q_norm"):
            q_norm = attention.q_norm.weight.expand(self.heads, -1)
            k_norm = attention.k_norm.weight.expand(self.kv_heads, -1)
            self.qk_norm = torch.cat([q_norm, k_norm])  # (H + H_kv, d)

    def __call__(self, x, cos, sin, cache):
        """x (R, C, D) and the rotation cos, sin (R, C, 1, d) give the layer's output (R, C, D)."""
        x = x + self.attend(normalize(self.norm, x), cos, sin, cache)
        mlp = self.mlp if x.shape[1] == 1 else self.prompt_mlp
        return x + mlp(normalize(self.mlp_norm, x))

    def attend(self, x, cos, sin, cache):
        attention, H, d = self.attention, self.heads, cos.shape[-1]
        qkv = self.qkv(x).unflatten(-1, (-1, d))  # (R, C, H + 2 H_kv, d)
        qk, v = qkv.split([H + self.kv_heads, self.kv_heads], 2)
        if self.qk_norm is not None:
            qk = F.rms_norm(qk, (d,), None, self.norm.variance_epsilon) * self.qk_norm
        qk = torch.addcmul(qk * cos, qk.roll(d // 2, -1), sin).transpose(1, 2)
        # (R, H_kv, S, d) each
        k, v = cache.update(qk[:, H:], v.transpose(1, 2), attention.layer_idx)
        y, _ = fast_row_attention(attention, qk[:, :H], k, v, None, attention.scaling, self.window,
                                  row_cache=cache)  # (R, C, H, d)
        return self.out(y.flatten(2))


def fused_mlp(gate_up, down, x):
    """Return the output of a SwiGLU MLP whose gate and up projections are one product."""
    gate, up = gate_up(x).chunk(2, -1)
    return down(F.silu(gate) * up)


def normalize(norm, x):
    """RMSNorm of x with the weight of this module."""
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


def packs_bfloat16(device) -> bool:
    """True where oneDNN has a layout for bfloat16: on CPUs with AVX-512 or its like."""
    return (device.type == "cpu" and torch.backends.mkldnn.is_available()
            and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def joined(*linears):
    """Return a function of x that gives the outputs of these Linears, one behind the other."""
    if all(map(plain, linears)):
        return JointLinear(linears)
    if len(linears) == 1:
        return linears[0]
    from extras.fast.beside import JointOutput  # for weights that hold no adapter
    return JointOutput(linears)


class JointLinear:
    """Several Linears of the same input as one product; their outputs stand one behind the other.

    Where oneDNN packs bfloat16 weights they are held in its layout, and merged weights are freed:
    `lora.merged` brings the base's back at its end. Else the model's own tensors are joined.
    """

    def __init__(self, linears):
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        weights = list(map(whole_weight, linears))
        self.weight = torch.cat(weights) if len(weights) > 1 else weights[0].detach()
        self.packs = self.weight.dtype == torch.bfloat16 and packs_bfloat16(self.weight.device)
        if self.packs:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight)
            free_merged(linears)
            return
        for weight, view in zip(weights, self.weight.split(list(map(len, weights)))):
            weight.data = view

    def __call__(self, x):
        if self.packs:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)
