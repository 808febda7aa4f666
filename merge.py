"""Merge an adapter into its base model: what `python lora.py merge` runs.

    python lora.py merge ADAPTER_OR_OUTPUT_FOLDER MODEL_FOLDER [--dtype bfloat16]

writes a plain model folder, in the dtype of the stored base: --dtype as in the run gives the
weights that it trained with. The layers import lora.py, so what loads with them stands here. The
commands `info` and `push` stand in extras/show/hub.py.
"""
import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from core.config import UserError  # before torch: sets how its threads wait
from core.model import DTYPES, facts, share_weights
from layers import load_model


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
        share_weights(whole)
        # A model with a vision tower is loaded with these, too.
        for path in Path(facts(model).source).glob("*processor_config.json"):
            shutil.copyfile(path, whole / path.name)
        whole.replace(folder)


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
