"""Count the kernels of an update on a GPU, without one: by operation, and by the place that asks for them.

    python bench/launches.py                          Qwen2.5-0.5B's shape, plain and 4bit, 1 and 8 rows of 1,024 tokens
    python bench/launches.py --memory plain --rows 1 --places 40

The model is on the meta device, where tensors have shapes and no numbers, so a model of any size takes seconds. An
operation that is no view counts as one kernel; torch's profiler on a card saw a tenth more (bench/log/gpu.md), because
some operations are several. An update is what grpo.py does with a micro-batch: merge, forward, backward, clip and AdamW.
The last line is the JSON.
"""
import argparse
import datetime
import json
import platform
import re
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import core.logprobs as logprobs  # noqa: E402
import core.packing as packing  # noqa: E402
import lora  # noqa: E402
from bench.budget import Bytes, _all_places, _fused_attention, all_rows, kind_of  # noqa: E402
from bench.gpu_norms import norms_as_on_a_gpu  # noqa: E402
from bench.gpu_parts import SHAPES  # noqa: E402
from core.model import adamw, facts  # noqa: E402
from layers import load_model  # noqa: E402

aten = torch.ops.aten
# They launch nothing.
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_local_scalar_dense",
             "_record_function_enter_new", "_record_function_exit"}
# Tensors that one launch of a multi-tensor kernel takes, by the lists that it reads and writes (MultiTensorApply.cuh).
OF_A_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
OURS = re.compile(r'File "(?:.*/)?((?:extras|core|bench)/[\w/]+|lora)\.py", line (\d+), in (\w+)')
THEIRS = re.compile(r'File ".*/(modeling_\w+|sdpa_attention)\.py", line (\d+), in (\w+)')


class Launches(Bytes):
    """The kernels inside a `with` block: `ops` by operation, `places` by function and operation.

    An operation of the backward pass counts where its forward operation stands.
    """

    def __init__(self, tracing: bool = False):
        super().__init__("meta", "cuda")
        self.ops, self.places = Counter(), Counter()
        self.tracing = tracing
        self.on = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        # An operation that writes into an argument, with out=, is no view either.
        works = func._schema.is_mutable or kind_of(func) in ("new", "in place")
        counts = self.on and works and name not in NO_KERNEL
        if counts:
            launched = launches_of(name, args)
            self.ops[name] += launched
            self.places[f"{place()} {name}" if self.tracing else ""] += launched
        results = super().__torch_dispatch__(func, types, args, kwargs)
        if counts:
            self.note(name, launched, (args, kwargs), results)
        return results

    def note(self, name: str, launched: int, inputs, results):
        """Called for each operation that counts, in the order of the launches."""

    @property
    def kernels(self) -> int:
        return sum(self.ops.values())


def launches_of(name: str, args) -> int:
    """Return how many kernels an operation is: several where it takes long lists of tensors."""
    lists = [x for x in args if isinstance(x, (list, tuple)) and len(x) > 1 and isinstance(x[0], torch.Tensor)]
    if name == "cat":
        return -(-len(args[0]) // 128)
    if not lists or not name.startswith(("_foreach", "_fused_adam")):
        return 1
    return -(-len(lists[0]) // OF_A_LAUNCH[min(5, len(lists))])


def place() -> str:
    """Return "file function" of the line that is running, or of whose gradient is computed."""
    import traceback
    lines = [f'File "{f.filename}", line {f.lineno}, in {f.name}' for f in traceback.extract_stack()[:-2]]
    backward = ""
    node = torch._C._current_autograd_node()
    if node is not None and not any("in backward" in line and "site-packages" not in line for line in lines[-6:]):
        lines, backward = node.metadata.get("traceback_") or lines, "grad "
    for line in reversed([word for text in lines for word in text.splitlines()]):
        found = OURS.search(line) or THEIRS.search(line)
        if found and found[1] != "bench/launches" and "bench/budget" not in found[1]:
            return f"{backward}{found[1]}:{found[2]} {found[3]}"
    return f"{backward}elsewhere"


@contextmanager
def standing_for_a_gpu():
    """Let the meta device run what a GPU runs, every piece of it."""
    with (mock.patch.object(torch.Tensor, "is_cpu", False),
          mock.patch.object(F, "scaled_dot_product_attention", _fused_attention),
          mock.patch.object(logprobs, "used_columns", lambda mask: mask.shape[1]),
          mock.patch.object(packing, "distinct", all_rows),
          mock.patch.object(torch.Tensor, "nonzero", _all_places),
          mock.patch.object(torch.nn.utils.clip_grad, "_has_foreach_support", lambda *_, **__: True),
          mock.patch.object(sys.modules["torch.optim.adam"], "_device_dtype_check_for_fused", lambda *_, **__: None),
          norms_as_on_a_gpu()):
        yield


def update(model, optimizer, ids, mask):
    """Do what grpo.py does with one micro-batch."""
    with lora.merged_to_train(model):
        new_logprobs, _ = logprobs.token_logprobs(model.train(), ids, mask)
        new_logprobs.sum().backward()
    weights = optimizer.param_groups[0]["params"]
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def count(folder: str, memory: str, rows: int, tokens: int, prompt: int, tracing: bool = True,
          counting=Launches, **options) -> Launches:
    """Return the launches of an update of these rows, of which all but the prompt is trained."""
    with standing_for_a_gpu(), counting(tracing) as launches:
        model, _ = load_model(folder, lora_r=16, dtype="bfloat16", memory=memory, device="meta", **options)
        facts(model).shares_prefix = False  # there are no numbers to look at
        optimizer = adamw(model, lr=1e-5)
        optimizer.param_groups[0]["fused"] = True  # as on a GPU
        ids = torch.empty(rows, tokens, dtype=torch.long, device="meta")
        mask = torch.empty_like(ids)
        # On the meta device a mask selects all. So the trained tokens alone are selected by hand.
        trained = rows * (tokens - prompt)
        with trained_alone(trained), torch.autograd.set_detect_anomaly(tracing, check_nan=False):
            update(model, optimizer, ids, mask)  # makes AdamW's moments
            launches.on = True
            update(model, optimizer, ids, mask)
            launches.on = False
    return launches


@contextmanager
def trained_alone(trained: int):
    """Let a mask select so many places, in place of all."""
    def some(mask):
        return mask.new_empty(min(trained, mask.numel()), mask.dim(), dtype=torch.long)
    with mock.patch.object(torch.Tensor, "nonzero", some):
        yield


def write_shape(shape: str, folder: Path) -> str:
    """Write a folder with the shape's config and a tokenizer, without weights."""
    from transformers import Qwen2Config

    from core.tiny import make_tiny
    tokenizer = make_tiny()[1]
    Qwen2Config(**SHAPES[shape][0], bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id, dtype="bfloat16",
                architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def main(args) -> dict:
    result = {"command": "python bench/launches.py " + " ".join(sys.argv[1:]), "date": datetime.date.today().isoformat(),
              "machine": platform.processor() or platform.machine(), "seed": None, "torch": torch.__version__,
              "shape": args.shape, "tokens": args.tokens, "prompt": args.prompt, "updates": {}}
    with tempfile.TemporaryDirectory() as folder:
        write_shape(args.shape, Path(folder))
        for memory in args.memory:
            for rows in args.rows:
                launches = count(folder, memory, rows, args.tokens, args.prompt, tracing=args.places > 0)
                print(f"{memory}, {rows} x {args.tokens}: {launches.kernels:,} kernels", flush=True)
                for where, n in launches.places.most_common(args.places):
                    print(f"  {n:6} {where}")
                result["updates"][f"{memory}, {rows} rows"] = {
                    "kernels": launches.kernels, "ops": dict(launches.ops.most_common())}
    if args.before:
        earlier = json.loads(Path(args.before).read_text().splitlines()[-1])
        result["before"] = {name: update["kernels"] for name, update in earlier["updates"].items()}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.5B", choices=SHAPES)
    parser.add_argument("--memory", nargs="+", default=["plain", "4bit"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--before", help="a file with the last line of an earlier call, whose counts are put beside")
    parser.add_argument("--places", type=int, default=0, help="so many of the places that ask for most kernels are printed")
    main(parser.parse_args())
