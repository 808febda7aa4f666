"""The command `python lora.py merge`: an adapter becomes a plain model folder.

    python lora.py merge ADAPTER_OR_OUTPUT_FOLDER MODEL_FOLDER [--dtype bfloat16]
"""
import argparse
import os
import sys

from core.config import UserError, prepare_streams
from core.loading import DTYPES, merge

PARSER = argparse.ArgumentParser(
    prog="lora.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("command", choices=["merge"])
PARSER.add_argument("source", help="an adapter folder, or an output folder (its newest checkpoint)")
PARSER.add_argument("folder", help="where the model goes: a new folder")
PARSER.add_argument(
    "--dtype", default="auto", choices=DTYPES,
    help="of the weights; auto: as the base is stored; the run's: the weights that it trained with")


def main(words: list[str]) -> int:
    """Run the command and return its exit status."""
    args = PARSER.parse_args(words)
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
    prepare_streams()
    sys.exit(main(sys.argv[1:]))
