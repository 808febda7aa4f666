"""Merge an adapter into its base model: what `python lora.py merge` runs.

    python lora.py merge ADAPTER_OR_OUTPUT_FOLDER MODEL_FOLDER [--dtype bfloat16]

writes a plain model folder, in the dtype of the stored base: --dtype as in the run gives the
weights that it trained with. Other programs, transformers 4 among them, find in it what they find
in the base. The layers import lora.py, so what loads with them stands here. The commands `info` and
`push` stand in extras/show/hub.py.
"""
import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from core.config import UserError, check_installation  # before torch: sets how its threads wait
from core.data import read_json
from core.model import DTYPES, facts, read_tokenizer, share_weights
from layers import load_model

# Of a base: what its tokenizer and its processor of pictures are read from.
TOKENIZER = ("tokenizer*.json", "*.model", "*.tiktoken", "special_tokens_map.json",
             "added_tokens.json", "vocab.*", "merges.txt")
PROCESSOR = ("*processor_config.json",)
# Keys of a base's config.json that say nothing of a merged model, or are not true of it.
LEFT_OUT = {"quantization_config", "auto_map", "transformers_version", "_name_or_path"}


def merge(source: str, folder: str, dtype: str = "auto"):
    """Write the plain model folder, weights and tokenizer, of an adapter or output folder.

    The folder is whole or absent.
    """
    place = Path(folder).absolute().parent
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".merge-", dir=place) as beside:
        whole = Path(beside, "model")
        model, tokenizer = load_model(source, dtype=dtype, train=False, merge=True)
        for thing in (model, tokenizer):
            thing.save_pretrained(whole)
        if facts(model).source != "tiny":
            keep_words_of_base(whole, facts(model).source, tokenizer)
        share_weights(whole)
        whole.replace(folder)


def keep_words_of_base(folder: Path, source: str, tokenizer):
    """Write into a merged folder what the files of its base say in words that others read.

    transformers 5 renames keys of config.json, such as rope_theta, and writes tokenizers that 4
    cannot read. Who looks for such a key takes a default without a word.
    """
    from transformers.utils import cached_file
    base = Path(cached_file(source, "config.json")).parent  # of a hub id, the folder in the cache
    copied = [*PROCESSOR]
    if words_of(tokenizer) == words_of(read_tokenizer(source)):
        copied += TOKENIZER
    for path in [path for pattern in copied for path in base.glob(pattern)]:
        shutil.copyfile(path, folder / path.name)
    edit(folder / "config.json", with_known_keys, read_json(base / "config.json"))
    edit(folder / "tokenizer_config.json", with_known_tokens)


def edit(path: Path, change, *arguments):
    """Replace the JSON object in a file by change(object, *arguments)."""
    before = read_json(path)
    after = change(before, *arguments)
    if after != before:
        text = json.dumps(after, indent=2, sort_keys=True, ensure_ascii=False)
        path.write_text(text + "\n", "utf-8")


def words_of(tokenizer) -> tuple:
    """Return what a tokenizer does: its tokens and rules, its special tokens, its template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend else tokenizer.get_vocab()
    return rules, tokenizer.special_tokens_map, tokenizer.chat_template


def with_known_keys(config: dict, stated: dict) -> dict:
    """Return a config with the keys that its base's config has and transformers 5 has renamed."""
    if "text_config" not in config:  # a model with a vision tower is loaded as a text model
        stated = stated.get("text_config", stated)
    known = {name: value for name, value in stated.items() if name not in LEFT_OUT}
    if "torch_dtype" in known:
        known["torch_dtype"] = config.get("dtype")
    return flat_rope(config.get("rope_parameters") or {}) | known | config


def flat_rope(parameters: dict) -> dict:
    """Return the keys of transformers 4 for rope_parameters, unless each kind of layer has its own.

    transformers 5 reads these first.
    """
    if "rope_theta" not in parameters:
        return {}
    rest = dict(parameters)
    flat = {name: rest.pop(name) for name in ("rope_theta", "partial_rotary_factor")
            if name in rest}
    return flat | {"rope_scaling": rest if rest["rope_type"] != "default" else None}


def with_known_tokens(config: dict) -> dict:
    """Return a tokenizer's config in the words of transformers 4, which 5 reads as its own."""
    known = dict(config)
    if known.get("tokenizer_class") == "TokenizersBackend":
        known["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(known.get("extra_special_tokens"), list):
        known["additional_special_tokens"] = known.pop("extra_special_tokens")
    return known


def main(words: list[str]) -> int:
    """Run the command and return its exit status."""
    if words and words[0] in ("info", "push"):
        try:
            from extras.show.hub import main as command
        except ModuleNotFoundError:
            print(f"lora.py: {words[0]} needs extras/show, which is not here", file=sys.stderr)
            return 2
        return command(words)
    parser = argparse.ArgumentParser(
        prog="lora.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["merge"])
    for name in ("source", "folder"):
        parser.add_argument(name)
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    args = parser.parse_args(words)
    try:
        check_installation()
        # The folder may hold the adapter's base, and the adapter would be applied twice.
        if os.path.lexists(args.folder) and os.listdir(args.folder):
            raise UserError(f"{args.folder}: is not empty; give a new folder")
        merge(args.source, args.folder, args.dtype)
        print(f"written: {args.folder}, a plain model folder")
    except KeyboardInterrupt:
        print(f"lora.py: interrupted; {args.folder} is as it was", file=sys.stderr)
        return 130
    except (UserError, OSError) as error:
        print(f"lora.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    if sys.stdout:  # it may be closed
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main(sys.argv[1:]))
