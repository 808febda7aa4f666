"""The forward pass of the Llama family (Llama, Qwen2, Qwen3) in few kernels, for the rollout.

A layer takes 11 kernels and the attention, where the stock modules launch 41 to 57: RMSNorm, one
product for q, k and v, RoPE on q and k together, attention, the output product, RMSNorm, one
product for gate and up, SwiGLU, the down product. It has no gradients.

It is compared with the stock modules before it is used. Every other architecture, 4-bit weights,
an adapter that is not merged, and modules with hooks stay with the stock modules.

It takes no memory: the joint weights replace the model's tensors, which become views of them. On
a CPU, bfloat16 weights are held in oneDNN's layout, in which a product of few rows takes 25 to
35 % less time. Merged weights are then freed. Other weights stay beside the packed ones.
"""
import torch
from torch import nn
from torch.nn import functional as F

from experiment.process import give_back_memory
import llm.pointwise as pointwise
from llm.attention import row_attention
from llm.checkpointing import tiled
from llm.facts import facts
from llm.kv_cache import RowCache
from lora import adapted_forward, keep_packed, packed, whole_policy


def fused_forward(model, stock):
    """Return the fused forward of a model as its weights are now, or None where it does not apply.

    Whether it agrees with `stock`, the forward of the stock modules, is asked once per model.
    """
    known = facts(model)
    if known.fuses is False or not fits(model):
        return None
    try:
        fused = Fused(model)
        known.fuses = known.fuses or agrees(model, fused, stock)
    except Exception:  # the model lacks something that this family has
        known.fuses = False
    if not known.fuses:
        return None
    fused.free_merged_weights()
    return fused


def fits(model) -> bool:
    """True if the fused forward may apply: a supported architecture of plain Linears, no hooks.

    Adapters must be merged, so that the weights are those of the whole policy.
    """
    if model.config.model_type not in pointwise.FAMILY:
        return False
    return all(_as_built(module, model.device) for module in model.base_model.modules())


def _as_built(module, device) -> bool:
    if not whole_policy(module) or module._forward_hooks or module._forward_pre_hooks:
        return False
    if isinstance(module, nn.Linear) and (
            type(module) is not nn.Linear or module.weight.device != device):
        return False
    replaced = vars(module).get("forward")
    # These compute the same numbers by other means.
    known = tiled, pointwise.mlp, pointwise.norm, adapted_forward
    return not replaced or getattr(replaced, "func", None) in known


@torch.inference_mode()
def agrees(model, fused, stock) -> bool:
    """True if both forwards give the same logits of two chunks of the same row.

    In bfloat16 single tokens may differ widely, because control tokens, the first of a vocabulary,
    make huge activations. So the median of the errors decides.
    """
    config = model.config.get_text_config()
    ids = torch.linspace(config.vocab_size // 4, config.vocab_size - 1, 12, device=model.device)

    def logits(forward):
        cache = RowCache(config.num_hidden_layers, 1, model.device)
        chunks = []
        for start, chunk in zip((0, 8), ids.long()[None].split(8, 1)):
            cache.prepare([0], [start], [chunk.shape[1]])
            chunks.append(forward.head(forward(chunk, cache)))
        return torch.cat(chunks, 1).float()  # (1, 12, V)
    expected = logits(stock)
    error = ((logits(fused) - expected).norm(dim=-1) / expected.norm(dim=-1)).median()
    return bool(error < (1e-4 if model.dtype == torch.float32 else 0.05))


class Fused:
    """The fused forward: `fused(ids, cache)` gives hidden states, `fused.head(hidden)` logits."""

    @torch.no_grad()
    def __init__(self, model):
        self.base = model.base_model
        self.packs = (model.device.type == "cpu" and model.dtype == torch.bfloat16
                      and torch.backends.mkldnn.is_available())
        self.products = []
        self.layers = [FusedLayer(layer, self._joint) for layer in self.base.layers]
        head = model.get_output_embeddings()
        self.head = self._joint(head) if type(head) is nn.Linear else head

    def _joint(self, *linears):
        self.products.append(JointLinear(linears, self.packs))
        return self.products[-1]

    def __call__(self, ids, cache):
        """Return the last hidden states (R, C, D) of ids (R, C), each at its cache.position."""
        x = self.base.embed_tokens(ids)  # (R, C, D)
        cos, sin = (t[:, :, None] for t in self.base.rotary_emb(x, cache.position))  # (R, C, 1, d)
        half = sin.shape[-1] // 2
        # The sign of RoPE's rotation goes into the sine. What is left of it is a roll.
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        for layer in self.layers:
            x = layer(x, cos, sin, cache)
        return normalize(self.base.norm, x)

    def free_merged_weights(self):
        """Free merged weights that are packed. `lora.merged` brings the base's back at its end."""
        for product in self.products:
            if product.packs:
                keep_packed(product.linears, product.weight)
        give_back_memory()


class FusedLayer:
    """One decoder layer."""

    def __init__(self, layer, joint):
        """joint: makes one product of several Linears."""
        self.attention = attention = layer.self_attn
        mlp = layer.mlp
        self.norm = layer.input_layernorm
        self.mlp_norm = layer.post_attention_layernorm
        self.qkv = joint(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = joint(attention.o_proj)
        self.gate_up = joint(mlp.gate_proj, mlp.up_proj)
        self.down = joint(mlp.down_proj)
        self.heads = attention.q_proj.out_features // attention.head_dim  # H
        self.kv_heads = attention.k_proj.out_features // attention.head_dim  # H_kv
        self.qk_norm = None
        if hasattr(attention, "q_norm"):
            q_norm = attention.q_norm.weight.expand(self.heads, -1)
            k_norm = attention.k_norm.weight.expand(self.kv_heads, -1)
            self.qk_norm = torch.cat([q_norm, k_norm])  # (H + H_kv, d)

    def __call__(self, x, cos, sin, cache):
        """x (R, C, D) and the rotation cos, sin (R, C, 1, d) give the layer's output (R, C, D)."""
        x = x + self.attend(normalize(self.norm, x), cos, sin, cache)
        gate, up = self.gate_up(normalize(self.mlp_norm, x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def attend(self, x, cos, sin, cache):
        H, H_kv, d = self.heads, self.kv_heads, cos.shape[-1]
        qkv = self.qkv(x).unflatten(-1, (-1, d))  # (R, C, H + 2 H_kv, d)
        qk, v = qkv.split([H + H_kv, H_kv], 2)
        if self.qk_norm is not None:
            qk = F.rms_norm(qk, (d,), None, self.norm.variance_epsilon) * self.qk_norm
        qk = torch.addcmul(qk * cos, qk.roll(d // 2, -1), sin).transpose(1, 2)
        # (R, H_kv, S, d) each
        k, v = cache.update(qk[:, H:], v.transpose(1, 2), self.attention.layer_idx)
        window = getattr(self.attention, "sliding_window", None)
        y, _ = row_attention(self.attention, qk[:, :H], k, v, None, self.attention.scaling, window,
                             row_cache=cache)  # (R, C, H, d)
        return self.out(y.flatten(2))


def normalize(norm, x):
    """RMSNorm of x with the weight of this module."""
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


class JointLinear:
    """Several Linears of the same input as one product; their outputs stand one behind the other.

    packs: hold the weight in oneDNN's layout instead of joining the model's own tensors.
    """

    def __init__(self, linears, packs: bool):
        self.linears = linears
        self.packs = packs
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        weights = [linear.weight for linear in linears]
        if not packs:
            self.weight = join(weights)
            return
        # An Engine before may have packed the same merged weights.
        self.weight = packed(linears)
        if self.weight is None:
            whole = torch.cat(weights) if len(weights) > 1 else weights[0].detach()
            self.weight = torch.ops.mkldnn._reorder_linear_weight(whole)

    def __call__(self, x):
        if self.packs:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


def join(weights):
    """Return the weights (out, in) as one (sum of out, in), of which they become views."""
    lengths = [len(weight) for weight in weights]
    first = weights[0].detach()
    if all(map(_follows, weights[1:], weights)):  # joined by an Engine before
        return first.as_strided((sum(lengths), first.shape[1]), first.stride())
    whole = torch.cat(weights)
    for weight, rows in zip(weights, whole.split(lengths)):
        weight.data = rows
    return whole


def _follows(weight, before) -> bool:
    """True if a weight begins in the same storage where the weight before it ends."""
    storages = [x.untyped_storage().data_ptr() for x in (weight, before)]
    return storages[0] == storages[1] and weight.data_ptr() == before.data_ptr() + before.nbytes
