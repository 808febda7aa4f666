"""Frozen weights in fewer bits: NF4 for the layers, int8 for the embedding and the output head."""
import logging
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from extras.memory.checkpointing import recompute, to_host
from core.logprobs import CHUNK, blocks, scaled

BLOCK_ROWS = 4096  # rows of an int8 table that are in the compute dtype at once
NF4_BLOCK = 64  # weights that share a scale
SCALE_BLOCK = 256  # scales that share a float32 scale of their own

# bitsandbytes warns that it cannot fetch a kernel from the hub, which it does not need.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


class Linear4bit(nn.Linear):
    """A frozen Linear in NF4 with double quantization (arXiv 2305.14314 section 3): 4.13 bits.

    A weight is one of 16 levels times the scale of its block of 64. The scales have 8 bits each,
    with one offset for all and a float32 scale per 256 of them. Every forward and backward pass
    dequantizes the weight to the dtype of its input and drops it again.
    """

    def __init__(self, weight, bias=None):
        # The constructor of nn.Linear would allocate the full weight.
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        packed, buffers = quantize_nf4(weight)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)

    def dequantize(self, dtype):
        """Return the weight (out, in) in the given dtype."""
        absmax = torch.ops.bitsandbytes.dequantize_blockwise(
            self.scale, self.nested, self.code, SCALE_BLOCK, torch.float32)
        absmax += self.offset
        return torch.ops.bitsandbytes.dequantize_4bit(
            self.weight, absmax, NF4_BLOCK, "nf4", (self.out_features, self.in_features), dtype)

    def forward(self, x):
        if x.is_meta or not torch.is_inference_mode_enabled():
            return _Matmul4bit.apply(x, self.weight, self)
        # On a GPU and for few rows, this product reads the 4-bit weight and never unpacks it.
        return torch.ops.bitsandbytes.gemm_4bit(
            x, self.weight, (self.out_features, self.in_features), self.nested, NF4_BLOCK, "nf4",
            bias=self.bias, absmax_8bit=self.scale, absmax_code=self.code,
            absmax_offset=self.offset)


def quantize_nf4(weight):
    """Return the packed weight (n / 2, 1) and the buffers that `Linear4bit.dequantize` reads."""
    from bitsandbytes.functional import create_dynamic_map
    kernels = torch.ops.bitsandbytes
    # The CPU kernel takes 64 bytes a weight while it works, so it gets a piece at a time.
    piece = 2**16 if weight.device.type == "cpu" else weight.numel()
    pieces = [kernels.quantize_4bit(x, NF4_BLOCK, "nf4", torch.uint8)
              for x in weight.flatten().split(piece)]
    absmax = torch.cat([absmax for _, absmax in pieces])  # (n / 64,)
    offset = absmax.mean()
    code = create_dynamic_map().to(weight.device)
    scale, nested = kernels.quantize_blockwise(absmax - offset, code, SCALE_BLOCK)
    return torch.cat([packed for packed, _ in pieces]), {
        "scale": scale, "nested": nested, "code": code, "offset": offset}


class _Matmul4bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, packed, linear):
        ctx.linear = linear
        # Saved for its version counter: if streaming overwrites the slot before backward, autograd
        # raises instead of using wrong weights.
        ctx.save_for_backward(packed)
        return F.linear(x, linear.dequantize(x.dtype), linear.bias)

    @staticmethod
    def backward(ctx, grad):
        # Reading them checks their version counters.
        ctx.saved_tensors
        return grad @ ctx.linear.dequantize(grad.dtype), None, None


def fits_4bit(module) -> bool:
    """True if the module is a plain Linear whose weight divides into blocks of 64.

    One with few inputs, whose weight Gemma 3n changes in place, stays as it is.
    """
    is_plain = type(module) is nn.Linear and module.in_features >= 16
    return is_plain and module.weight.numel() % NF4_BLOCK == 0


class Int8Table:
    """The (V, D) weight of an embedding, of an output head, or of both if they are tied, in int8.

    A row is whole numbers up to 127 times a scale of its own: 0.8 % error, where NF4 has 9 %.
    """

    def __init__(self, weight, on_host: bool = False):
        """Quantize `weight`. With `on_host` it stays in host memory and rows are copied over."""
        self.dtype = weight.dtype
        data = torch.empty_like(weight, dtype=torch.int8)
        scale = torch.empty(len(weight), 1, device=weight.device)  # (V, 1), float32
        for block in blocks(len(weight), 512):
            exact = weight[block].float()
            scale[block] = exact.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
            data[block] = (exact / scale[block]).round().to(torch.int8)
        if on_host:
            data, scale = to_host(data), to_host(scale)
        self.data, self.scale = data, scale

    def dequantize(self, index, device):
        """Return rows (N, D) in the model's dtype. `index` is a slice, or ids (N,) by the table."""
        weight = self.data[index].to(device, non_blocking=True).to(self.dtype)
        return weight.mul_(self.scale[index].to(device, non_blocking=True).to(self.dtype))


class Int8Embedding(nn.Module):
    """An embedding whose weight is an Int8Table. Gemma multiplies its embeddings by a factor."""

    def __init__(self, table: Int8Table, factor: float):
        super().__init__()
        self.table = table
        self.weight = table.data
        self.num_embeddings = len(table.data)
        self.factor = torch.tensor(factor, dtype=table.dtype).item()

    def forward(self, ids):
        index = ids.flatten().to(self.table.data.device)
        embedded = self.table.dequantize(index, ids.device)
        return embedded.view(*ids.shape, -1) * self.factor  # (B, T, D)


class Int8Head(nn.Module):
    """An output head (N, D) -> (N, V) whose weight is an Int8Table."""

    def __init__(self, table: Int8Table, bias=None):
        super().__init__()
        self.table = table
        # Only its shape and dtype are asked for: Mamba 2 casts the input of its head to it.
        self.weight = table.data.new_empty((), dtype=table.dtype).expand_as(table.data)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def block_logits(self, hidden, block: slice):
        """Return the logits of a block of V only."""
        bias = None if self.bias is None else self.bias[block]
        return F.linear(hidden, self.table.dequantize(block, hidden.device), bias)

    def forward(self, hidden):
        logits = hidden.new_empty(*hidden.shape[:-1], len(self.weight))
        for block in blocks(len(self.weight), BLOCK_ROWS):
            logits[..., block] = self.block_logits(hidden, block)
        return logits

    def logprobs(self, model, hidden, targets, temperature):
        """Return log-probability and entropy (n,) of targets (n,) after hidden states (n, D).

        The weight is too large to dequantize as a whole. A block of the vocabulary with the weights
        p_b = exp(lse_b - lse) has its share in the softmax, so that

            lse = log sum exp(lse_b)        H = lse - sum p_b mean_b

        The backward pass computes the blocks again.
        """
        block_rows = min(BLOCK_ROWS, max(128, CHUNK // 4 // max(1, len(hidden))))
        # The blocks' gradients are added in float32.
        exact = hidden.float()
        columns = []
        for block in blocks(len(self.weight), block_rows):
            run = partial(self.block_sums, model, hidden.dtype, block, targets, temperature)
            columns.append(recompute(run, exact))
        lse_b, mean_b, target_z = torch.stack(columns).unbind(1)  # (blocks, n) each
        lse = lse_b.logsumexp(0)  # (n,)
        entropy = lse - ((lse_b - lse).exp() * mean_b).sum(0)
        return target_z.sum(0) - lse, entropy

    def block_sums(self, model, dtype, block: slice, targets, temperature, hidden):
        """Return log-sum-exp, mean and target of a block's logits z, (3, n).

        The mean is taken under the block's own softmax. A target in another block counts as 0.
        """
        logits = scaled(model.config, self.block_logits(hidden.to(dtype), block))
        z = logits.float() / temperature  # (n, v)
        lse = z.logsumexp(-1)
        mean = ((z - lse[:, None]).exp() * z).sum(-1)
        inside = (targets >= block.start) & (targets < block.stop)
        column = torch.where(inside, targets - block.start, 0)
        return torch.stack([lse, mean, z.gather(1, column[:, None])[:, 0] * inside])


@torch.no_grad()
def round_weights(model, quantized: str):
    """Round a plain model's weights to what they stand for once they are quantized.

    `quantized` names the forms, as an adapter's file does: "nf4", "int8" (embedding and head).
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if "int8" in quantized:
        # Of tied weights the set has one.
        for weight in {embedding.weight, head.weight}:
            weight.copy_(Int8Table(weight).dequantize(slice(None), weight.device))
    if "nf4" in quantized:
        for module in model.modules():
            if module is not head and fits_4bit(module):
                module.weight.copy_(Linear4bit(module.weight).dequantize(module.weight.dtype))
