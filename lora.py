"""The policy's weights: loading, LoRA, the reference policy, log-probabilities, saving, merging.

`load_model(path)` takes `tiny`, a hub id, a model folder, an adapter folder or an output folder of this project (its newest
checkpoint). LoRA (arXiv 2106.09685) lives as two small Linears, `lora_A` and `lora_B`, inside the Linear they adapt, and a
forward hook adds their product; so the model stays the stock transformers model, and the files are PEFT's own format.

    python lora.py merge ADAPTER_OR_OUTPUT_FOLDER MODEL_FOLDER      writes a plain model folder
"""
import json
import math
import os
import re
import sys
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

from run import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# ------------------------------------------------------------------------------------------------------ the tiny model
TINY_TEMPLATE = """{%- set first = messages[0] if messages[0].role == 'system' else none %}
{%- if first or tools %}<|im_start|>system
{{ first.content if first else '' }}
{%- if tools %}
<tools>
{%- for tool in tools %}
{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})
{%- endfor %}
</tools>
{%- endif %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- elif message.role != 'system' or not loop.first %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}{{ '\n' if message.content or not loop.first }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# What the byte-level BPE is trained on, besides the numbers below 200: one token each, so that copying one takes one step.
TINY_TEXT = """system user assistant tool Solve for x with the tools. terms value operation expression answer number name query
add_terms subtract_terms multiply_terms divide_terms identify_operation state_answer calculator error right wrong yes no
name(terms) name(value) name(operation) name(expression), x + 7 = x/4 - (x) Question: How many? You are a helpful agent. Use the tools, then give the answer.
the of and to in is it for on that with as are was be at by this have from or one had not but what all were when we there
Action Reward add subtract multiply divide both sides term times over is not equivalent. numbers too large. takes must be"""
TINY_SPLIT = r"""\n\{"name": "|", "arguments": \{"|"\}\}\n|\([a-z]+\)|\d{1,3}|-| ?[A-Za-z_]+|[^\dA-Za-z_-]+"""


def make_tiny(seed: int = 0):
    """A Qwen3 of about 0.9 M random parameters, its byte-level tokenizer and its ChatML/Hermes template -> model, tokenizer.

    Not a Qwen2: transformers 5 opens every folder of type qwen2 with Qwen2's own splitting rules, whatever tokenizer.json says.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    backend = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(TINY_SPLIT), "isolated"), byte_level])
    backend.decoder = decoders.ByteLevel()
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    markup = ["<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    call = '\n{"name": "state_answer", "arguments": {"value": "3"}}\n'
    texts = [TINY_TEXT.replace("\n", " "), TINY_TEXT.replace(" ", "\n")] * 2   # words with and without a space
    backend.train_from_iterator(texts + [call] * 8 + [str(n) for n in range(200)] * 2, trainers.BpeTrainer(
        vocab_size=1024, min_frequency=2, special_tokens=control, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    backend.add_tokens(markup)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TINY_TEMPLATE
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, initializer_range=0.06, tie_word_embeddings=True, bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    return model, tokenizer


# ------------------------------------------------------------------------------------------------------------- loading
def load_model(path: str, *, lora_r: int = 0, lora_alpha: float | None = None, lora_dropout: float = 0.0,
               lora_target_modules: str = "all-linear", use_rslora: bool = False, dtype: str = "float32",
               device: str | None = None, seed: int = 0):
    """The model and tokenizer at `path` -> (model, tokenizer), ready to train.

    lora_r > 0 adds a fresh adapter, unless `path` is an adapter: then training goes on from it. lora_r = 0 trains all
    weights (an adapter is merged first). `dtype` is that of the frozen weights; what trains is float32.
    UserError: one line with the mend.
    """
    path = newest(path)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    adapter = os.path.exists(os.path.join(path, "adapter_config.json"))
    source = base_of(path) if adapter else path
    kept = DTYPES[dtype] if lora_r else torch.float32  # weights that train are read and stay in float32
    model, tokenizer = make_tiny(seed) if source == "tiny" else _read_model(source, kept)
    if adapter and os.path.exists(os.path.join(path, "tokenizer_config.json")):
        tokenizer = _read_tokenizer(path)
    if not tokenizer.chat_template:
        raise UserError(f"{path}: its tokenizer has no chat template; use an instruct model, or put chat_template.jinja beside it")
    model.base_path, model.lora_config = source, None
    model.to(device)
    if source == "tiny":
        for p in model.parameters():  # not model.to(kept): it would round the RoPE frequencies, a buffer, to bf16
            p.data = p.data.to(kept)
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UserError(f"{path}: tokenizer has {len(tokenizer)} tokens, model {rows}")
    model.requires_grad_(False)
    _check_logits(model.eval(), source)
    if adapter:
        load_adapter(model, path)
    if adapter and not lora_r:
        merge_adapter(model)
    elif lora_r and not adapter:
        add_lora(model, lora_r, lora_alpha if lora_alpha is not None else 2 * lora_r, lora_dropout,
                 lora_target_modules, use_rslora, seed)
    if not lora_r:
        model.requires_grad_(True)
    return model.eval(), tokenizer  # eval: dropout, where asked for, is switched on by the update alone


def newest(path: str) -> str:
    """An output folder becomes its newest checkpoint; every other path stays as it is."""
    folder = os.path.join(path, "checkpoints")
    steps = sorted(d for d in os.listdir(folder) if re.fullmatch(r"step_\d+", d)) if os.path.isdir(folder) else []
    if os.path.isdir(path) and not steps and not any(f.endswith("config.json") for f in os.listdir(path)):
        raise UserError(f"{path}: no config.json, no adapter_config.json and no checkpoints in this folder")
    return os.path.join(folder, steps[-1]) if steps else path


def base_of(adapter: str) -> str:
    """The base model an adapter folder points to; `base/` of its output folder if that place has moved."""
    base = _adapter_config(adapter).get("base_model_name_or_path") or ""
    beside = os.path.join(adapter, "..", "..", "base")
    return os.path.normpath(beside) if not os.path.exists(base) and os.path.isdir(beside) else base


def _adapter_config(adapter: str) -> dict:
    try:
        with open(os.path.join(adapter, "adapter_config.json"), encoding="utf-8") as f:
            return dict(json.load(f))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{adapter}/adapter_config.json: cannot be read: {_first_line(error)}") from None


def _read_tokenizer(source: str, **where):
    from transformers import AutoTokenizer
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **where)
    except Exception as error:
        raise UserError(f"{source}: no tokenizer could be read ({_first_line(error)})") from None


def _read_model(source: str, dtype):
    from huggingface_hub import model_info
    from transformers import AutoModelForCausalLM
    if not os.path.isdir(source) and (source.startswith((".", "/", "~")) or source.count("/") != 1):
        raise UserError(f"{source}: no such folder; give tiny, a model or output folder, or a hub id like Qwen/Qwen2.5-0.5B-Instruct")
    if os.path.isdir(source) and not any(f.endswith(".safetensors") for f in os.listdir(source)):
        pickled = next((f for f in os.listdir(source) if f.endswith((".bin", ".pt", ".pth"))), None)
        raise UserError(f"{source}: {pickled} is pickle; convert to safetensors" if pickled else f"{source}: no .safetensors file")

    def read(**where):
        model, report = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, trust_remote_code=False, use_safetensors=True, output_loading_info=True, adapter_kwargs=where, **where)
        if report["missing_keys"]:  # transformers would go on with random numbers there
            raise UserError(f"{source}: no weights for {', '.join(sorted(report['missing_keys'])[:3])}: the model is incomplete")
        return model, _read_tokenizer(source, **where)

    try:
        try:  # files on this machine first: without a network the hub's own order costs a minute of retries
            return read(local_files_only=True)
        except (OSError, UserError):  # UserError: the weights are in the hub's cache, the tokenizer is not
            if os.path.isdir(source):
                raise
            model_info(source, timeout=10)  # fails at once where from_pretrained would try again for a minute
            return read()
    except UserError:
        raise
    except Exception as error:  # OSError, SafetensorError, ...: name the place, keep the cause
        raise UserError(f"{source}: cannot be loaded: {_first_line(error)}") from None


def _check_logits(model, source: str):
    """Three tokens through the model itself and through `head_logits`: what else a head may do must not go unseen."""
    probe = torch.arange(3, device=model.device)[None]
    with torch.no_grad():
        own = model(input_ids=probe, use_cache=False).logits.float()
        ours = head_logits(model, model.base_model(input_ids=probe, use_cache=False).last_hidden_state).float()
    if not torch.isfinite(own).all():
        raise UserError(f"{source}: its weights give logits that are not finite; the file is damaged, or needs --dtype float32")
    if (ours - own).abs().max() > 0.02 * own.abs().max():
        raise UserError(f"{source}: {type(model).__name__} scales its logits in a way that lora.head_logits does not know")


def _first_line(error) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def fast_float32() -> bool:
    """Let oneDNN run float32 matmuls with bf16 instructions if that stays float32-accurate on this CPU -> True if on.

    With AVX512-BF16 the split product is twice as fast with an error of 4e-7; with AMX the same switch really rounds.
    """
    try:
        matmul = torch.backends.mkldnn.matmul
        before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    except (AttributeError, RuntimeError):
        return False
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 33, 512):
        x, w = torch.randn(rows, 384, generator=generator), torch.randn(384, 129, generator=generator)
        exact = x.double() @ w.double()
        if ((x @ w).double() - exact).abs().max() > 3e-6 * exact.abs().max():
            matmul.fp32_precision = before
            return False
    return True


# ---------------------------------------------------------------------------------------------------------------- LoRA
def add_lora(model, r: int, alpha: float, dropout: float = 0.0, targets="all-linear", use_rslora: bool = False, seed: int = 0):
    """Give every targeted Linear lora_A (r, in) and lora_B (out, r): y = W x + scale B A x; A uniform, B zero.

    scale = alpha / r, with rsLoRA (arXiv 2312.03732) alpha / sqrt(r). Targets: "all-linear" (all but the output head), names
    separated by commas, or PEFT's list or regular expression.
    """
    if isinstance(targets, str) and re.fullmatch(r"[\w,. -]+", targets) and targets != "all-linear":
        targets = [t.strip() for t in targets.split(",")]
    def wanted(name):
        if targets == "all-linear":
            return True
        if isinstance(targets, str):
            return re.fullmatch(targets, name)
        return any(name == t or name.endswith("." + t) for t in targets)
    head = model.get_output_embeddings()
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head and wanted(name)}
    if not linears:
        raise UserError(f"--lora_target_modules {targets}: no Linear of that name; the model has: "
                         + ", ".join(sorted({n.rsplit('.', 1)[-1] for n, m in model.named_modules() if isinstance(m, nn.Linear)})))
    generator = torch.Generator().manual_seed(seed)
    for linear in linears.values():
        new = {"device": linear.weight.device, "dtype": torch.float32, "bias": False}
        A, B = nn.Linear(linear.in_features, r, **new), nn.Linear(r, linear.out_features, **new)
        bound = 1 / math.sqrt(linear.in_features)  # kaiming_uniform with a = sqrt(5), as in the LoRA code and PEFT
        A.weight.data.copy_((torch.rand(A.weight.shape, generator=generator) * 2 - 1) * bound)
        nn.init.zeros_(B.weight)
        linear.lora_A, linear.lora_B = A, B
        linear.lora_scale, linear.lora_dropout, linear.lora_on = alpha / (math.sqrt(r) if use_rslora else r), dropout, True
        linear.register_forward_hook(_lora_hook)
    names = sorted({name.rsplit(".", 1)[-1] for name in linears}) if targets == "all-linear" else targets
    model.lora_config = {"r": r, "lora_alpha": alpha, "lora_dropout": dropout, "target_modules": names, "use_rslora": use_rslora}
    model.lora_fresh = True  # B is zero: the policy without its adapter is the policy this run started from


def _lora_hook(linear, inputs, output):
    if not linear.lora_on:
        return output
    x = F.dropout(inputs[0], linear.lora_dropout, training=linear.training)
    A, B = linear.lora_A.weight.to(x.dtype), linear.lora_B.weight.to(x.dtype)  # float32 masters, the base's dtype in use
    return output + F.linear(F.linear(x, A), B) * linear.lora_scale


def lora_linears(model) -> dict:
    return {name: m for name, m in model.named_modules() if hasattr(m, "lora_A")}


@contextmanager
def merged(model):
    """W + scale B A as working weights inside the block; the base tensors are put aside unwritten, so they return bit for bit."""
    put_aside = {}
    try:
        for linear in lora_linears(model).values():
            put_aside[linear] = linear.weight.data
            linear.weight.data = (linear.weight.data.float() + linear.lora_scale * (
                linear.lora_B.weight.data @ linear.lora_A.weight.data)).to(linear.weight.dtype)
            linear.lora_on = False
        yield
    finally:
        for linear, weight in put_aside.items():
            linear.weight.data, linear.lora_on = weight, True


def merge_adapter(model):
    """Add the adapter into the weights for good; the model is then a plain one."""
    for linear in lora_linears(model).values():
        linear.weight.data += (linear.lora_scale * (linear.lora_B.weight.data @ linear.lora_A.weight.data)).to(linear.weight.dtype)
        linear._forward_hooks.clear()
        del linear.lora_A, linear.lora_B
    model.lora_config = None


# ------------------------------------------------------------------------------------------------ the reference policy
def freeze_reference(model) -> dict | None:
    """A copy of what trains, taken before the first update; None for a fresh adapter, which needs no copy."""
    if model.lora_config and model.lora_fresh:
        return None
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@contextmanager
def reference(model, frozen: dict | None):
    """Inside the block the model is the policy that this run started from: adapter off, or the frozen copies in place."""
    def swap():
        for name, p in model.named_parameters():
            if name in frozen:
                p.data, frozen[name] = frozen[name], p.data
    linears = [] if frozen else list(lora_linears(model).values())
    try:
        swap() if frozen else None
        for linear in linears:
            linear.lora_on = False
        yield
    finally:
        swap() if frozen else None
        for linear in linears:
            linear.lora_on = True


# --------------------------------------------------------------------------------------------------- log-probabilities
def token_logprobs(model, token_ids, loss_mask, temperature: float = 1.0, chunk_elements: int = 2**24):
    """log pi(token t | tokens before t) and the policy's entropy there, both in nats, float32, differentiable.

    token_ids, loss_mask: (B, T), right-padded. Returns logprobs (B, T), entropy (B, T), both 0.0 where the mask is 0.
    The one place in this project that shifts: column t belongs to token t, predicted from column t - 1; column 0 is 0.0.
    No attention mask is needed: behind a causal mask right padding is invisible to real tokens.
    The head runs on masked positions only, a chunk of them at a time, so that no (B, T, V) tensor ever exists.
    """
    with _update_attention(model, token_ids):
        hidden = model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state  # (B, T, D)
    where = loss_mask[:, 1:].bool()
    logprobs, entropy = _HeadLogprobs.apply(
        lambda h: head_logits(model, h), hidden[:, :-1][where], token_ids[:, 1:][where], temperature, chunk_elements,
        *[p for p in model.get_output_embeddings().parameters() if p.requires_grad])  # (N,) (N,)
    blank = hidden.new_zeros(token_ids.shape, dtype=torch.float32)  # (B, T)
    at = F.pad(where, (1, 0))  # (B, T)
    return blank.masked_scatter(at, logprobs), blank.masked_scatter(at, entropy)


@contextmanager
def _update_attention(model, token_ids, longest: int = 1024):
    """On a CPU, `matmul_attention` while its (B, H, T, T) scores are small; else, and on a GPU, the model's own."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    try:
        checkpointed = model.is_activation_checkpointing  # backward runs the layers again, after this block has ended
        if token_ids.device.type == "cpu" and token_ids.shape[1] <= longest and before == "sdpa" and not checkpointed:
            from transformers import AttentionInterface
            AttentionInterface.register("matmul_attention", matmul_attention)
            config._attn_implementation = "matmul_attention"
        yield
    finally:
        config._attn_implementation = before


def matmul_attention(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **_):
    """Causal attention of right-padded rows as two matmuls, the query heads of a KV head stacked as query rows.

    2 to 8 times faster here than the CPU's fused kernel forward and backward, whose grouped-query backward is slow.
    """
    B, H, T, D = query.shape
    groups = H // key.shape[1]
    ahead = torch.arange(T, device=query.device) - torch.arange(T, device=query.device)[:, None]  # (T, T) key - query
    hidden = (ahead > 0) | (ahead <= -sliding_window) if sliding_window else ahead > 0
    bias = torch.zeros(T, T, dtype=query.dtype, device=query.device).masked_fill_(hidden, -torch.inf)
    scores = (query * scaling).reshape(B, H // groups, groups * T, D) @ key.transpose(2, 3)  # (B, H_kv, groups * T, T)
    weights = (scores.view(B, H // groups, groups, T, T) + bias).softmax(-1)  # (B, H_kv, groups, T, T)
    out = weights.view(B, H // groups, groups * T, T) @ value  # (B, H_kv, groups * T, D)
    return out.view(B, H, T, -1).transpose(1, 2), None


def head_logits(model, hidden):
    """(N, D) -> (N, V): the output head with the scalings that Cohere, Granite and Gemma 2 put behind it."""
    logits, config = model.get_output_embeddings()(hidden), model.config
    if getattr(config, "logit_scale", None):
        logits = logits * config.logit_scale
    if getattr(config, "logits_scaling", None):
        logits = logits / config.logits_scaling
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits


class _HeadLogprobs(torch.autograd.Function):
    """Log-probability and entropy of log_softmax(head(hidden) / temperature), recomputed chunk by chunk in backward.

    With p = softmax(z), H = -sum p log p:  d logp_y / dz = onehot(y) - p,  dH / dz = -p (log p + H).
    """

    @staticmethod
    def forward(ctx, head, hidden, targets, temperature, chunk_elements, *weights):
        vocab = head(hidden[:1]).shape[-1]
        rows = max(1, chunk_elements // vocab)
        logprobs, entropy = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(2))
        for i in range(0, len(hidden), rows):
            logp = F.log_softmax(head(hidden[i:i + rows]).float() / temperature, dim=-1)  # (n, V)
            logprobs[i:i + rows] = logp.gather(1, targets[i:i + rows, None])[:, 0]
            entropy[i:i + rows] = -(logp.exp().mul_(logp)).sum(-1)
        ctx.head, ctx.temperature, ctx.rows, ctx.weights = head, temperature, rows, weights
        ctx.save_for_backward(hidden, targets, entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, targets, entropy = ctx.saved_tensors
        needs_entropy = bool(grad_entropy.any())
        grad_hidden, grad_weights = torch.empty_like(hidden), [torch.zeros_like(w) for w in ctx.weights]
        for i in range(0, len(hidden), ctx.rows):
            part = slice(i, i + ctx.rows)
            with torch.enable_grad():
                h = hidden[part].detach().requires_grad_()
                logits = ctx.head(h)  # (n, V)
            logp = F.log_softmax(logits.detach().float() / ctx.temperature, dim=-1)
            p = logp.exp()
            if needs_entropy:
                grad = logp.add_(entropy[part, None]).mul_(p).mul_(-grad_entropy[part, None])
                grad.addcmul_(p, grad_logprobs[part, None], value=-1)
            else:
                grad = p.mul_(-grad_logprobs[part, None])
            grad.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            grad = grad.div_(ctx.temperature).to(logits.dtype)
            grad_hidden[part], *chunk = torch.autograd.grad(logits, (h, *ctx.weights), grad)
            for total, new in zip(grad_weights, chunk):
                total += new
        return None, grad_hidden, None, None, None, *grad_weights


# -------------------------------------------------------------------------------------------------------------- saving
# The keys of PEFT's adapter_config.json that plain LoRA knows, or that change nothing. Any other one that is set is refused.
UNDERSTOOD = {"peft_type", "task_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "r",
              "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "bias", "fan_in_fan_out", "init_lora_weights",
              "eva_config", "layers_pattern", "megatron_core", "qalora_group_size", "runtime_config", "ensure_weight_tying"}


def save_model(model, folder: str):
    """The adapter in PEFT's format, or, when all weights train, a model folder (config.json, model.safetensors)."""
    from safetensors.torch import save_file
    if not model.lora_config:
        model.save_pretrained(folder)
        return
    os.makedirs(folder, exist_ok=True)
    tensors = {f"base_model.model.{name}.{part}.weight": getattr(linear, part).weight.detach().cpu().contiguous()
               for name, linear in lora_linears(model).items() for part in ("lora_A", "lora_B")}
    save_file(tensors, os.path.join(folder, "adapter_model.safetensors"), metadata={"format": "pt"})
    local = os.path.isdir(model.base_path)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True, "bias": "none", "fan_in_fan_out": False,
              "modules_to_save": None, "base_model_name_or_path": os.path.abspath(model.base_path) if local else model.base_path,
              **model.lora_config}
    with open(os.path.join(folder, "adapter_config.json"), "w") as f:
        json.dump(config, f, indent=2)


def load_adapter(model, folder: str):
    """Put PEFT's adapter files on a plain model. UserError names what of PEFT is not understood here."""
    from safetensors.torch import load_file
    config = _adapter_config(folder)
    odd = [key for key, value in config.items() if value and key not in UNDERSTOOD]
    if config.get("init_lora_weights", True) not in (True, False, "gaussian", "eva", "orthogonal"):
        odd.append(f"init_lora_weights {config['init_lora_weights']}")  # PiSSA, OLoRA, LoftQ, CorDA change the base weights too
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or odd:
        raise UserError(f"{folder}: only plain LoRA adapters are read here; this one has {', '.join(odd) or 'another peft_type or bias'}")
    add_lora(model, config["r"], config["lora_alpha"], config.get("lora_dropout", 0.0), config["target_modules"],
             config.get("use_rslora", False))
    try:
        tensors = load_file(os.path.join(folder, "adapter_model.safetensors"))
    except Exception as error:
        raise UserError(f"{folder}/adapter_model.safetensors: {_first_line(error)}") from None
    for name, linear in lora_linears(model).items():
        for part in ("lora_A", "lora_B"):
            tensor = tensors.pop(f"base_model.model.{name}.{part}.weight", None)
            weight = getattr(linear, part).weight
            if tensor is None or tensor.shape != weight.shape:
                raise UserError(f"{folder}: {name}.{part} is {'missing' if tensor is None else tuple(tensor.shape)}, "
                                 f"the model needs {tuple(weight.shape)}")
            weight.data.copy_(tensor)
    if tensors:
        raise UserError(f"{folder}: {next(iter(tensors))} has no place in this model")
    model.lora_fresh = False


def merge(source: str, folder: str):
    """Adapter or output folder -> plain model folder with merged weights and the tokenizer."""
    model, tokenizer = load_model(source)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] != "merge":
        sys.exit(__doc__)
    try:
        merge(*sys.argv[2:])
    except UserError as error:
        print(f"lora.py: {error}", file=sys.stderr)
        sys.exit(2)
