"""A tiny random model of every text decoder that transformers has, made from its own config class."""
from contextlib import suppress

import torch

from core.config import UserError
from core.model import facts
from lora import add_lora

# What makes a config small, by the names that configs use. Windows and chunks stay as large as they are: the probe narrows them.
SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "word_embed_proj_dim", "embedding_size", "input_embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim", "dim_ff"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size", "index_head_dim", "q_lora_rank",
                     "kv_lora_rank", "linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "hidden_size_per_layer_input",
                     "state_size", "ssm_state_size", "mamba_head_dim", "chunk_size", "mamba_chunk_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "num_experts", "num_local_experts",
                     "n_routed_experts", "moe_num_experts", "linear_num_value_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "num_selected_experts", "moe_topk", "moe_k", "index_n_heads",
                     "linear_num_key_heads", "encoder_layers"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "d_kv", "kv_channels", "rotary_dim", "global_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 128),
    **dict.fromkeys(("n_group", "topk_group", "n_groups"), 1),
    "vocab_size": 96, "vocab_size_per_layer_input": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "pad_token_id": 0}
# What is missing in these names, or what a published model of the family sets.
EXTRA = {
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2, "attn_layer_indices": [1, 3]},
    "doge": {"sliding_window": 4096}, "phimoe": {"sliding_window": 4096}, "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 4},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2}, "qwen3": {"use_sliding_window": True, "max_window_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]}, "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16, "layer_types": ["mamba", "attention"] * 2},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_ssm": 32, "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5,
                  "key_multiplier": 0.3, "attention_in_multiplier": 0.7, "attention_out_multiplier": 0.9, "mlp_multipliers": [0.8, 0.6],
                  "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9], "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2}, "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    **dict.fromkeys(("gemma3n", "gemma3n_text", "gemma4", "gemma4_text"), {
        "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2, "final_logit_softcapping": 3.0}),
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_head_dim": 8, "linear_num_heads": 4},
    "bert": {"is_decoder": True}, "roberta": {"is_decoder": True}}
# Not made: the decoder of a larger model, a config that cannot be small, or another kind of model.
WITHOUT = {"blt", "git", "phi4_multimodal"}  # these take seconds or gigabytes

# What `verdict` says of each. "trains" is also every model with a window of its mask alone, a bias of positions, or a cache of its own.
VERSION = "5.24."
TABLE = {}
for _verdict, _families in (
    ("runs", """
        afmoe apertus apertus1p5_text arcee aria_text axk1 bailing_hybrid bamba beam biogpt bitnet codegen cohere cohere2 cohere2_moe ctrl cwm
        deepseek_v3 diffllama ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon_h1 flex_olmo flint fuyu gemma gemma2
        gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_assistant gemma4_unified_text
        glm glm4 glm4_moe glm4_moe_lite got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite granite_swa granitemoe
        granitemoe_swa granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3
        iquestcoder jais2 jetmoe kimi_linear kolibri1 laguna lara_mini lfm2 lfm2_moe lfm3 llama longcat_flash mamba2 mellum mimo_v2_flash
        minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral moshi moss_transcribe_diarize
        nanochat nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt persimmon phi phi3 qwen2 qwen3 qwen3_5 qwen3_5_moe
        qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next sarvam_mla sarvam_moe seed_oss smollm3 solar_open starcoder2 vaultgemma youtu"""),
    ("trains", """
        bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart trocr whisper
        bloom doge dory falcon falcon_mamba gpt_neo gpt_neox_japanese
        hrm_text hy_v4 inkling2_loop_text inkling2_text jamba mamba mpt nemotron openai-gpt phimoe qwen2_moe rwkv stablelm xglm zamba"""),
    ("refused", """
        axk2 bert bert-generation big_bird camembert cpmant data2vec-text deepseek_v32 deepseek_v4
        dots3_note dots3_note_text electra ernie glm_moe_dsa inkling_text llama4 llama4_text megatron-bert modernbert-decoder
        prophetnet recurrent_gemma rembert roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xlstm"""),
    ("not made", """
        cohere_compass_text dbrx deepseek_v2 dots1 emu3 gemma4_assistant mllama musicgen musicgen_melody qwen4_exp
        qwen4_exp_text reformer xmod zamba2 zaya"""),
):
    TABLE.update(dict.fromkeys(_families.split(), _verdict))


def verdict(family: str) -> str:
    """Return "runs", "trains" (the engine refuses it), "refused" (at load) or "not made" (by `make`)."""
    from extras.fast.loading import speed_up
    from extras.models.probe import probe
    try:
        model = make(family)
        with torch.no_grad():
            model(input_ids=torch.arange(3, 9)[None], use_cache=False)
    except Exception:
        return "not made"
    try:
        speed_up(model)
        with suppress(UserError):  # some have no Linear
            add_lora(model, 2, 4)
        probe(model, family)
    except UserError:
        return "refused"
    return "trains" if facts(model).refuses_engine else "runs"


def families() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - WITHOUT)


def make(family: str, **options):
    """Return a random model of this family: four layers, 32 wide. `options` are of its config."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    kind = type(CONFIG_MAPPING[family]().get_text_config())
    plain = kind()
    sizes = {}
    for name, value in SMALL.items():
        name = plain.attribute_map.get(name, name)
        # A width that follows from others may be None, and is a property in some families.
        if vars(plain).get(name) is not None or (name in vars(plain) and name in ("num_key_value_heads", "head_dim")):
            sizes[name] = value
    if "kv_lora_rank" in sizes:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    config = kind(**{**sizes, **(EXTRA.get(family) or {}), **options})
    config._attn_implementation = None
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return filled(model)


def filled(model):
    """Give a model random weights of a trained model's size."""
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        if p.dim() > 1:
            p.data.normal_(std=0.8 / p.shape[-1]**0.5, generator=generator)
    return model


def off_by_rounding(model, dtype=torch.float32):
    """Put the weights of a float64 model off by what `dtype` rounds their sums by, and return it.

    A sum of n products in a dtype is off by about eps sqrt(n) of its size, in an order that each processor chooses for itself. How far that moves
    an output or a gradient depends on the model. So does this, but on no processor: every weight is off by so much, at random.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            relative = torch.finfo(dtype).eps * p.shape[-1]**0.5 if p.dim() else 0
            p.mul_(1 + relative * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return model
