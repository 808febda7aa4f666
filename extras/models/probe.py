"""The probe at load: a few tokens through three forward passes, which must agree.

    stock       transformers' own forward, with its own attention and masks
    training    `token_logprobs`, as an update runs it
    engine      a prompt, a tool result and decode steps over the KV cache

Where they differ, a model would be trained on other probabilities than it was sampled at. What
transformers adds or changes goes through here as well; no list of architectures is needed.
"""
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, wraps
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from core.chat import Chat
from core.config import UserError, first_line, reading, say_once
from core.engine import Engine, Row, StockForward, row_attention
from core.logprobs import token_logprobs
from core.model import facts, settings
from extras.presence import has
from extras.models import cache_of
from lora import Adapter, adapter_tensors, adapted_linears, is_adapted

TOKENS = 17  # of each of the probe's two rows
SHARED = 4  # tokens with which both rows begin, enough for `shared_prefix`
PROMPT = 5  # tokens of the engine's first prompt; the second one has one more
RESULT = 7  # tokens before the one that the engine reads in place of sampling it
WINDOW = 3  # tokens that a sliding window sees during the probe
LEFT_OUT = 0.05  # the share of weights without an adapter from which on it is said
# What rounding may change, of the standard deviation of the log-probabilities. Where it sends a
# token to another expert it changes more, so the limit is for the median of a row.
TOLERANCE = {torch.float32: 5e-4, torch.bfloat16: 0.1, torch.float16: 0.05}


def probed(load_model):
    """Return this load_model, which probes what it loads."""
    @wraps(load_model)
    def load(path: str, **options):
        with no_panic(path):
            model, tokenizer = load_model(path, **options)
        check_tokenizer(model, tokenizer, path)
        stop_where_turns_end(model, tokenizer)
        if model.device.type != "meta":
            probe(model, facts(model).source)
            note_what_is_left_out(model)
        return model, tokenizer
    return load


@contextmanager
def no_panic(path):
    """Turn the panic of a tokenizer's Rust code, which is no Exception, into a UserError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{path}: no tokenizer could be read ({first_line(error)}); its "
                        "tokenizer.json contradicts itself") from None


def check_tokenizer(model, tokenizer, path):
    """Refuse a tokenizer that cannot encode, or may write tokens that have no embedding.

    A special token that the template does not write needs none, such as Gemma 3's for images.
    """
    with no_panic(path), reading(path):
        tokenizer.decode(tokenizer.encode("a"))
    vocabulary = len(model.get_input_embeddings().weight)
    written = str(tokenizer.chat_template)
    for name in ("bos_token", "eos_token"):
        written = written.replace(name, getattr(tokenizer, name) or "")
    lacks_one = tokenizer.vocab_size > vocabulary or any(
        i >= vocabulary and (not token.special or token.content in written)
        for i, token in tokenizer.added_tokens_decoder.items())
    if lacks_one:
        raise UserError(f"{path}: tokenizer has {len(tokenizer)} tokens, model {vocabulary}: "
                        "they belong to different models")


def stop_where_turns_end(model, tokenizer):
    """Let `generate` of what is saved stop at the end of a turn, which base models do not name."""
    config = model.generation_config
    with suppress(ValueError):
        config.eos_token_id = sorted(Chat(tokenizer, [], config).stop_ids)
        # Transformers would not save a changed one that has a temperature and no do_sample.
        config._original_object_hash = hash(config)


def check_finite(path, tensors: dict):
    """Raise UserError if a value in the tensors that were read from `path` is not finite."""
    for name, tensor in tensors.items():
        # A sum is not finite where a value is not, and needs no memory.
        if not tensor.sum(dtype=torch.float32).isfinite():
            raise UserError(f"{path}: {name} has values that are not finite; the file is damaged")


def probe(model, source: str):
    """Compare the forward passes of a model that `load_model` has read from `source`.

    The model's `Facts` get what it finds. Raises UserError if the weights are damaged, if training
    differs, or if an adapter that was named or given is never used; others are taken away.
    """
    began = time.monotonic()
    known = facts(model)
    name = f"{source}: {type(model).__name__}"
    ids = torch.arange(2 * TOKENS, device=model.device).view(2, TOKENS) * 7 % 61 + 7
    ids[:, :SHARED] = ids[0, :SHARED]
    mask = torch.ones_like(ids)
    mask[:, :SHARED] = 0

    def train():
        return token_logprobs(model, ids, mask)[0][:, SHARED:]

    with narrow_windows(model):
        logits = stock_logits(model, ids, name)  # (2, TOKENS - 1, V)
        drop_adapters(model, ids, name)
        # Streamed layers take turns in two buffers: what lies there may be another layer's.
        if not getattr(facts(model).techniques, "stream_layers", False):
            check_finite(source, dict(model.named_parameters()))
        if not logits.isfinite().all():
            raise UserError(f"{name}: its weights give logits that are not finite; "
                            "the file is damaged, or needs --dtype float32")
        stock = logprobs_of(logits, ids)
        # Some models return float32 logits whatever computed them.
        dtype = model.get_output_embeddings().weight.dtype
        compare = partial(disagreement, TOLERANCE[dtype] * stock.std())
        early = ids[:, :SHARED]
        alone = partial(logprobs_of, stock_logits(model, early, name), early)
        if problem := compare(stock[:, :SHARED - 1], alone):
            raise UserError(f"{name}: is not causal: without the later tokens a forward {problem}")
        if problem := compare(stock[:, SHARED - 1:], train):
            raise UserError(f"{name}: the training forward {problem}")
        if problem := compare(stock[:, RESULT:], partial(engine_logprobs, model, ids)):
            known.refuses_engine = f"{name}: the engine cannot decode it: it {problem}"
    known.shares_prefix = False
    apart = train()
    known.shares_prefix = True
    # A state would pass on to the next row, a convolution's to fewer tokens than a median shows.
    known.shares_prefix = not (known.state_bytes or compare(apart, train))
    print(f"{name}: training and decoding checked in {time.monotonic() - began:.1f} s")


def logprobs_of(logits, ids):
    """Return the log-probabilities (B, T - 1) of all ids (B, T) but the first."""
    return logits.float().log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]


def disagreement(limit, stock, run) -> str:
    """Say what is wrong with the log-probabilities that run() returns: "" within the limit."""
    try:
        logprobs = run().detach()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"fails: {first_line(error)}"
    error = (logprobs - stock).abs().median(dim=1).values.max()
    return "" if error <= limit else f"differs from transformers' by {error:.2g} nats a token"


@torch.no_grad()
def stock_logits(model, ids, name: str):
    """Return the logits (B, T - 1, V) of ids (B, T) by transformers' own forward."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = "sdpa" if before == "causal_attention" else before
    try:
        return model(input_ids=ids, use_cache=False).logits[:, :-1]
    except (RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{name}: cannot run on text alone: {first_line(error)}") from None
    finally:
        config._attn_implementation = before


@torch.no_grad()
def drop_adapters(model, ids, name: str):
    """Take the adapters away of Linears whose weights an update on ids (B, T) reads itself.

    Kernels that fuse several steps do, so that an adapter beside such a Linear has no part in the
    output. Raises UserError if they were named as targets, or belong to an adapter that was given.
    """
    inside, read_past = set(), set()

    def enter(module, *_):
        inside.add(module)

    def leave(module, *_):
        inside.discard(module)

    def read(linear, attribute):
        if attribute == "weight" and linear not in inside:
            read_past.add(linear)
        return nn.Module.__getattr__(linear, attribute)

    reading = mock.patch.object(nn.Linear, "__getattr__", read, create=True)
    # Some kernels are for training alone.
    model.train()
    with register_module_forward_pre_hook(enter), register_module_forward_hook(leave), reading:
        stock_logits(model, ids, name)
    model.eval()
    linears = adapted_linears(model)
    # The last two parts of a name are enough for --lora_target_modules.
    end_of = {path: ".".join(path.split(".")[-2:]) for path in linears}
    dropped = {end_of[path] for path, linear in linears.items() if linear in read_past}
    if not dropped:
        return
    kept = sorted(set(end_of.values()) - dropped)
    passed = f"{name}: its forward passes by the adapters of {', '.join(sorted(dropped))}"
    if not settings(model).fresh:
        raise UserError(f"{passed}; merge the adapter first (python lora.py merge)")
    if not settings(model).all_linear:
        raise UserError(f"{passed}; give --lora_target_modules {','.join(kept)}")
    print(f"note: {passed}: they are left out")
    for path, linear in linears.items():
        if end_of[path] in dropped:
            del linear.lora, linear.forward
    settings(model).tensors = adapter_tensors(model)
    settings(model).peft["target_modules"] = kept


def note_what_is_left_out(model):
    """Say once how many weights the default of --lora_target_modules leaves without an adapter.

    The experts of a mixture are stacked in one parameter, and no Linear.
    """
    if not (settings(model) and settings(model).all_linear):
        return
    sizes, missed = Counter(), Counter()  # by the last part of a module's name
    for path, module in model.get_decoder().named_modules():
        name = path.rpartition(".")[2]
        if isinstance(module, nn.Linear):  # in 4 bits its weight has another shape
            sizes[name] += module.in_features * module.out_features
        elif not isinstance(module, nn.Embedding | Adapter):
            sizes[name] += sum(p.numel() for p in module.parameters(recurse=False) if p.ndim > 1)
        if not is_adapted(module):
            missed[name] = sizes[name]
    share = missed.total() / sizes.total()
    if share > LEFT_OUT:
        names = ", ".join(name for name, size in missed.items() if size > 0.01 * sizes.total())
        say_once(f"note: {facts(model).source}: all-linear leaves {share:.0%} of the layers' "
                 f"weights without an adapter ({names}); they stay as they are")


def engine_logprobs(model, ids):
    """Return the engine's log-probabilities (2, TOKENS - RESULT - 1) of the ids after RESULT."""
    attention = row_attention
    if has("fast"):  # which decodes in place of core's
        from extras.fast.attention import fast_row_attention as attention
    engine = Engine(model, slots=2, decoder=StockForward(model, attention),
                    cache=cache_of(model))
    rows = [Row(row[:n], limit=RESULT - n, forced=row[n:])
            for n, row in enumerate(ids.tolist(), PROMPT)]
    engine.add(rows)
    while engine.busy:
        for row in engine.step():
            # After the first turn the id at RESULT comes as a tool result.
            if row.forced:
                engine.extend(row, [row.forced.pop(0)], TOKENS - RESULT - 1)
    facts(model).token_bytes = sum(t[0, :, 0].nbytes for t in engine.cache.tensors.values())
    states = getattr(engine.cache, "states", {})
    facts(model).state_bytes = sum(t[0].nbytes for t in states.values())
    return torch.tensor([row.logprobs for row in rows], device=ids.device)


@contextmanager
def narrow_windows(model):
    """Inside the block every sliding window is narrower than the probe's rows are long."""
    with ExitStack() as stack:
        for thing in (model.config, model.config.get_text_config(), *model.modules()):
            for name, value in vars(thing).items():
                is_window = name.endswith(("window", "window_size", "attention_chunk_size"))
                if is_window and type(value) is int and value > WINDOW:
                    stack.callback(vars(thing).update, {name: value})
                    vars(thing)[name] = WINDOW
        yield
