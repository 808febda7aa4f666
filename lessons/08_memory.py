"""The memory of a training step: counted from shapes, measured, and made smaller.

    python lessons/08_memory.py --seed 0        needs 4.3 GB of memory

The model has the shape of SmolLM2-135M and random weights: nothing is downloaded. In
float32 each number has 4 bytes, and of P weights, of which Q train, a step holds

    weights 4 P   gradients 4 Q   AdamW 2 x 4 Q   activations, logits of N tokens: `count`

Four steps are watched. Each has one more of the lines (1), (2) and (3) in
`watched_step`. Predict the largest part of each step, and its time.
"""
import argparse
import gc
import time
import weakref
from functools import partial
from itertools import pairwise

from picture import draw
from start import report

import torch
from torch.utils.checkpoint import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig

from core.engine import Row, make_engine
from core.logprobs import token_logprobs
from core.model import adamw
from core.run import peak_memory_mb
from lora import add_lora

NAME = "08_memory"
SHAPE = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
         "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
EPISODES, TOKENS = 4, 256  # of a forward pass; the second half of each episode was sampled
ROWS, PROMPT, NEW = 16, 96, 31  # of the rollout whose KV cache is measured
RANK = 16  # of the adapter
FLOAT, MB = 4, 1e6  # bytes
# Which of the lines (1), (2) and (3) are in use.
RUNS = {"all weights": (), "(1) adapter": (1,), "(2) layers": (1, 2), "(3) head": (1, 2, 3)}
PARTS = ("weights", "gradients", "AdamW", "layers", "logits")


def count(lines) -> dict:
    """Return the bytes of each part, from the shapes alone. `lines` are those that are in use."""
    V, D, I, L, heads, kv_heads = SHAPE.values()
    KV = D // heads * kv_heads  # the width of keys, and of values
    N = EPISODES * TOKENS
    # Embedding and head are one. Of a layer: q and o; k and v; gate, up and down; two norms.
    weights = V * D + L * (2 * D * D + 2 * D * KV + 3 * D * I + 2 * D) + D
    # A (r, in) and B (out, r) beside each of these seven.
    adapter = L * RANK * (2 * 2 * D + 2 * (D + KV) + 3 * (D + I)) if 1 in lines else 0
    # What a layer keeps of a token until the backward pass: 2 norms (input, normalized, output),
    # queries, keys, values and the attention's output, and 4 products of the MLP.
    floats = 2 * 3 * D + 2 * D + 2 * KV + 4 * I
    if 1 in lines:
        floats += 7 * RANK - 2 * D  # seven A x; the scale of a norm is frozen and needs no input
    if 2 in lines:
        floats = D  # the layer's input: the rest is computed again
    return {"weights": FLOAT * (weights + adapter), "gradients": FLOAT * (adapter or weights),
            "AdamW": FLOAT * 2 * (adapter or weights), "layers": FLOAT * L * N * floats,
            "logits": FLOAT * N * V * (3 not in lines)}


class LiveBytes(TorchDispatchMode):
    """Inside the block, count the bytes of every tensor that is made, until it is freed."""

    def __init__(self, tensors):
        super().__init__()
        self.live = nbytes(tensors)  # these are there already
        self.wide = 0  # bytes of new tensors that are as wide as the vocabulary
        self.known = weakref.WeakSet(tensor.untyped_storage() for tensor in tensors)
        self.curve = [(time.process_time(), self.live)]  # after every operation

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]:
            storage = tensor.untyped_storage()
            if storage not in self.known:  # it is no view of another tensor
                self.known.add(storage)
                is_wide = tensor.shape[-1:] == (SHAPE["vocab_size"],)
                self.change(storage.nbytes(), is_wide)
                weakref.finalize(storage, self.change, -storage.nbytes(), is_wide)
        self.curve.append((time.process_time(), self.live))
        return result

    def change(self, number: int, is_wide: bool):
        self.live += number
        self.wide += number * is_wide


def all_logits(model, token_ids, mask):
    """Return log pi(token) (B, T), by the logits of all tokens (B, T - 1, V) at once."""
    logits = model(token_ids, use_cache=False).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(2, token_ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(logprobs, (1, 0)) * mask


def make_model(seed: int):
    """Return a model of this shape with random weights."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, tie_word_embeddings=True))


def watched_step(seed: int, lines) -> dict:
    """Take a step of the policy gradient with a fresh model; return the bytes of each part."""
    model, logprobs_of = make_model(seed).train(), all_logits
    if 1 in lines:
        add_lora(model, RANK, 2 * RANK)  # (1) train two small matrices beside each weight
    if 2 in lines:
        for layer in model.model.layers:  # (2) keep a layer's input alone, and run the layer twice
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if 3 in lines:
        logprobs_of = lambda *batch: token_logprobs(*batch)[0]  # (3) logits of a chunk at a time
    optimizer = adamw(model, lr=1e-4)
    trained = optimizer.param_groups[0]["params"]
    # AdamW makes its two averages at its first step, which is not the one that is watched.
    for p in trained:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    token_ids = torch.randint(SHAPE["vocab_size"], (EPISODES, TOKENS))
    mask = (torch.arange(TOKENS) >= TOKENS // 2).long().expand(EPISODES, TOKENS)
    advantages = torch.randn(EPISODES, 1)
    weights = list(model.parameters())
    averages = [tensor for state in optimizer.state.values() for tensor in state.values()]
    with LiveBytes(weights + averages) as watch:
        logprobs = logprobs_of(model, token_ids, mask)
        loss = -(advantages * logprobs).sum() / mask.sum()
        kept, logits = watch.live - watch.curve[0][1], watch.wide  # for the backward pass
        loss.backward()
        optimizer.step()
    seconds, live = zip(*watch.curve)
    return {"weights": nbytes(weights), "gradients": nbytes(p.grad for p in trained),
            "AdamW": nbytes(averages), "layers": kept - logits, "logits": logits,
            "peak": max(live), "seconds": seconds[-1] - seconds[0],
            "curve": ([s - seconds[0] for s in seconds[::20]],
                      [max(live[i:i + 20]) / MB for i in range(0, len(live), 20)])}


def nbytes(tensors) -> int:
    """Return the bytes of the tensors' elements."""
    return sum(tensor.nbytes for tensor in tensors)


def kv_cache(seed: int) -> tuple[int, int]:
    """Decode some rows; return the counted and the measured bytes of their keys and values."""
    engine = make_engine(make_model(seed).eval(), slots=ROWS, tokens=PROMPT + NEW)
    engine.add([Row(range(PROMPT), group=0, seed=row, limit=NEW) for row in range(ROWS)])
    while engine.busy:
        engine.step()
    _, D, _, L, heads, kv_heads = SHAPE.values()
    counted = FLOAT * 2 * L * (D // heads * kv_heads) * ROWS * (PROMPT + NEW)
    return counted, nbytes(engine.cache.tensors.values())


def main(seed=0):
    """Watch the four steps and a rollout, show what to look at, and draw it."""
    print(f"\nA step on {EPISODES} episodes of {TOKENS} tokens, in MB: counted from shapes, and "
          "measured.\n'layers' and 'logits' are what the forward pass keeps for the backward pass;"
          "\n'peak' is the most that was there at once. Watch which column is the largest.\n")
    print(" " * 19 + "".join(f"{part:>10}" for part in PARTS) + "  peak  CPU")
    rows = {}
    for name, lines in RUNS.items():
        row = rows[name] = watched_step(seed, lines)
        gc.collect()  # the adapter and its Linear point at each other
        row["counted"] = count(lines)
        for label, numbers in ((f"{name:11} counted", row["counted"]), ("measured", row)):
            cells = "".join(f"{numbers[part] / MB:10.0f}" for part in PARTS)
            print(f"{label:>19}{cells}" + "\n" * (numbers is not row), end="")
        print(f"{row['peak'] / MB:6.0f}{row['seconds']:4.0f}s", flush=True)
    cache = dict(zip(("counted", "measured"), kv_cache(seed)))
    print(f"\nKV cache of a rollout, {ROWS} rows of {PROMPT + NEW} tokens: counted "
          f"{cache['counted'] / MB:.0f} MB, measured {cache['measured'] / MB:.0f}.\n")

    totals = [[sum(x[p] for p in PARTS) for x in (row, row["counted"])] for row in rows.values()]
    off = max(abs(measured / counted - 1) for measured, counted in totals)
    print(f"The counts of each step add up to what was measured, within {off:.1%}.")
    for old, new in pairwise(rows):
        change = {key: rows[new][key] - rows[old][key] for key in (*PARTS, "peak")}
        most = min(PARTS, key=change.get)
        times = rows[new]["seconds"] / rows[old]["seconds"]
        print(f"{new + ':':12} peak {change['peak'] / MB:+.0f} MB, most of it {most} "
              f"({change[most] / MB:+.0f}), in {times:.2f} times the time.")
    resident = peak_memory_mb() * 2**20  # NaN on Windows, which does not count it
    print(f"The system saw at most {resident / MB:.0f} MB in this process, programs included.\n")
    draw(NAME, {"title": "a step", "x": "CPU seconds", "y": "MB in tensors", "legend": "beside",
                "curves": {name: row.pop("curve") for name, row in rows.items()}})
    report(NAME, seed, {"off": off, "resident": resident}, rows=rows, kv_cache=cache)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
