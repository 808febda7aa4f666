"""The rollout's forward pass of the Llama family (Llama, Qwen2, Qwen3) in few kernels, for `generate.Engine`.

A layer is RMSNorm, one product for q, k and v, RoPE on q and k at once, attention, output product, RMSNorm, one product
for gate and up, SwiGLU, down product: 11 kernels and the attention, where the stock modules launch 41 to 57. No
gradients. The Engine compares it with the stock modules before it trusts it; every other architecture, weights that are
no plain Linears (4 bits), an adapter that is not merged and modules with hooks stay with the stock modules.

Memory: none. The joint weights take the place of the model's own tensors, which become views of them; they are put
together layer by layer. A CPU with bfloat16 weights holds them in oneDNN's own layout, in which a product of few rows
takes 25 to 35 % less time: merged weights instead of the model's tensors, others beside them while an Engine lives.
"""
import torch
from torch import nn
from torch.nn import functional as F

from experiment.process import give_back_memory
from llm import pointwise
from llm.checkpointing import tiled
from llm.logprobs import head_logits
from lora import adapted_forward, keep_packed, packed, whole_policy


def fits(model) -> bool:
    """Is every module what it was built as, with weights that hold the whole policy?"""
    if model.config.model_type not in pointwise.FAMILY:
        return False
    for module in model.base_model.modules():
        forward = vars(module).get("forward")
        if (not whole_policy(module) or isinstance(module, nn.Linear) and (
                type(module) is not nn.Linear or module.weight.device != model.device)
                or module._forward_hooks or module._forward_pre_hooks
                or forward and getattr(forward, "func", None) not in (
                    tiled, pointwise.mlp, pointwise.norm, adapted_forward)):
            return False
    return True


class Fused:
    """`fused(ids, cache)` -> last hidden states; `fused.head(hidden)` -> logits. The weights as they are now."""

    @torch.no_grad()
    def __init__(self, model, attention):
        self.model, self.attention = model, attention
        self.packs = (model.device.type == "cpu" and model.dtype == torch.bfloat16
                      and torch.backends.mkldnn.is_available())
        self.layers, self.packed = [], []
        for layer in model.base_model.layers:
            a, mlp = layer.self_attn, layer.mlp
            heads = a.q_proj.out_features // a.head_dim, a.k_proj.out_features // a.head_dim  # H, H_kv
            norms = torch.cat([norm.weight.expand(n, -1) for norm, n in zip((a.q_norm, a.k_norm), heads)]) if hasattr(
                a, "q_norm") else None  # (H + H_kv, d)
            self.layers.append((a, heads, layer.input_layernorm.weight, self._linear(a.q_proj, a.k_proj, a.v_proj),
                                norms, self._linear(a.o_proj), layer.post_attention_layernorm.weight,
                                self._linear(mlp.gate_proj, mlp.up_proj), self._linear(mlp.down_proj)))
        head = model.get_output_embeddings()
        self.head = self._linear(head) if type(head) is nn.Linear else lambda hidden: head_logits(model, hidden)

    def __call__(self, ids, cache):
        """ids (R, C), each at its cache.position (R, C) -> (R, C, D)."""
        base, eps = self.model.base_model, self.model.config.rms_norm_eps
        x = base.embed_tokens(ids)  # (R, C, D)
        cos, sin = (t[:, :, None] for t in base.rotary_emb(x, cache.position))  # (R, C, 1, d) each
        d = cos.shape[-1]
        sin = torch.cat([-sin[..., :d // 2], sin[..., d // 2:]], -1)  # its sign goes along: a roll is all that is left
        for i, (a, (H, H_kv), norm, qkv, qk_norm, out, mlp_norm, gate_up, down) in enumerate(self.layers):
            y = qkv(F.rms_norm(x, x.shape[-1:], norm, eps)).unflatten(-1, (-1, d))  # (R, C, H + 2 H_kv, d)
            qk, v = y.split([H + H_kv, H_kv], 2)
            if qk_norm is not None:
                qk = F.rms_norm(qk, (d,), None, eps) * qk_norm
            qk = torch.addcmul(qk * cos, qk.roll(d // 2, -1), sin).transpose(1, 2)  # (R, H + H_kv, C, d)
            k, v = cache.update(qk[:, H:], v.transpose(1, 2), i)  # (R, H_kv, S, d) each
            y, _ = self.attention(a, qk[:, :H], k, v, None, scaling=a.scaling, row_cache=cache,
                                  sliding_window=getattr(a, "sliding_window", None))  # (R, C, H, d)
            x = x + out(y.flatten(2))
            gate, up = gate_up(F.rms_norm(x, x.shape[-1:], mlp_norm, eps)).chunk(2, -1)
            x = x + down(F.silu(gate) * up)
        return F.rms_norm(x, x.shape[-1:], base.norm.weight, eps)

    def drop_merged(self):
        """Merged weights that are packed go; `lora.merged` keeps the base's, and brings them back where it ends."""
        for linears, weight in self.packed:
            keep_packed(linears, weight)
        give_back_memory()

    def _linear(self, *linears):
        """One product for all of them: x -> their outputs, one behind the other."""
        biases = [linear.bias for linear in linears if linear.bias is not None]
        bias = torch.cat(biases) if biases else None
        if not self.packs:
            weight = joined([linear.weight for linear in linears])
            return lambda x: F.linear(x, weight, bias)
        weight = packed(linears)  # by an Engine before, of the same merged weights
        if weight is None:
            weights = [linear.weight.detach() for linear in linears]
            weight = torch.ops.mkldnn._reorder_linear_weight(torch.cat(weights) if len(weights) > 1 else weights[0])
        self.packed.append((linears, weight))
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def joined(weights):
    """The weights (out, in) as one (sum of out, in), of which they themselves become views; or are already."""
    first, total = weights[0], sum(len(w) for w in weights)
    one = all(w.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and w.is_contiguous()
              for w in weights)
    if one and all(b.data_ptr() == a.data_ptr() + a.nbytes for a, b in zip(weights, weights[1:])):
        return first.detach().as_strided((total, first.shape[1]), first.stride())
    whole = torch.cat([w.detach() for w in weights])
    for weight, part in zip(weights, whole.split([len(w) for w in weights])):
        weight.data = part
    return whole
