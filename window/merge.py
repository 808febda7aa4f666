"""The command `python lora.py merge`: an adapter becomes a plain model folder.

    python lora.py merge ADAPTER_OR_OUTPUT_FOLDER MODEL_FOLDER
"""
import os
import shlex
import sys

from experiment.errors import UserError
from llm.loading import merge


def main(words: list[str]) -> int:
    """Run the command and return its exit status."""
    if len(words) != 3 or words[0] != "merge":
        print(__doc__, file=sys.stderr)
        return 2
    folder = words[2]
    try:
        os.makedirs(folder, exist_ok=True)
        # The folder may hold the adapter's base, and the adapter would be applied twice.
        if os.listdir(folder):
            raise UserError(f"{folder}: is not empty; give a new folder")
        merge(*words[1:])
        print("merged into a plain model folder. Talk to it:\n"
              f"  python agent.py --model_path {shlex.quote(folder)}")
    except (UserError, OSError) as error:
        print(f"lora.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
