"""What adapter folders in PEFT's format say: the base model, the settings, how the base was stored."""
import os

from experiment.data import read_json
from experiment.errors import UserError

# The keys of PEFT's adapter_config.json that plain LoRA knows, or that change nothing. Others that are set are refused.
UNDERSTOOD = {"peft_type", "task_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision",
              "inference_mode", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "bias",
              "fan_in_fan_out", "init_lora_weights", "eva_config", "layers_pattern", "megatron_core",
              "qalora_group_size", "runtime_config", "ensure_weight_tying"}


def adapter_base(folder: str) -> str:
    """Return the base model that an adapter folder points to.

    If that place has moved, it is `base/` in the adapter's folder or in its output folder.
    """
    base = _adapter_config(folder).get("base_model_name_or_path")
    if not base:
        raise UserError(f"{folder}/adapter_config.json: no base_model_name_or_path; "
                        "write the base model's folder or hub id there")
    if not os.path.exists(base):
        for beside in (os.path.join(folder, "base"), os.path.join(folder, "..", "..", "base")):
            if os.path.isdir(beside):
                return os.path.normpath(beside)
    return base


def _adapter_config(folder: str) -> dict:
    return read_json(os.path.join(folder, "adapter_config.json"))


def quantization_of(folder: str) -> str:
    """Return how the base of an adapter was stored: "" (as in its files), "nf4", "int8" (the head) or "nf4,int8"."""
    from safetensors import safe_open
    try:
        with safe_open(os.path.join(folder, "adapter_model.safetensors"), "pt") as file:
            return (file.metadata() or {}).get("base", "")
    except Exception:  # load_weights says what is wrong with the file
        return ""


def read_settings(folder: str) -> dict:
    """Return adapter_config.json. UserError names what of PEFT is not understood here."""
    config = _adapter_config(folder)
    odd = [key for key, value in config.items() if value and key not in UNDERSTOOD]
    # PiSSA, OLoRA, LoftQ and CorDA change the base too.
    if config.get("init_lora_weights", True) not in (True, False, "gaussian", "eva", "orthogonal"):
        odd.append(f"init_lora_weights {config['init_lora_weights']}")
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or odd:
        raise UserError(f"{folder}: only plain LoRA adapters are read here; "
                        f"this one has {', '.join(odd) or 'another peft_type or bias'}")
    return config
