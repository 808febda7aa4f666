"""Loading from our checkpoints: their files are whole, base model and settings the same."""
import os
import re
import sys
from functools import wraps
from pathlib import Path

from core.config import UserError
from core.model import ADAPTER, base_of, is_adapter, newest, read_settings
from extras.exact.checkpoint import check_base, read_state
from lora import Adapter, target_names


def sealed(load_model):
    """Return this load_model, which verifies a checkpoint or an adapter before it reads it."""
    @wraps(load_model)
    def load(path: str, **options):
        path = newest(path)
        read_state(path)  # sizes and sha256
        if is_adapter(path):
            check_settings(path, **options)
            check_place(path, base_of(path))
            check_base(path, base_of(path))
        return load_model(path, **options)
    return load


def check_place(path, base: str):
    """Refuse an adapter whose base model is named by what can be no folder or hub id."""
    if not os.path.isdir(base) and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base):
        place = Path(path).resolve() / ADAPTER
        raise UserError(f"{place}: base_model_name_or_path {base}: no such folder; write the base "
                        "model's folder or hub id there")


def check_settings(path, *, lora_r=0, lora_alpha=None, lora_target_modules="all-linear",
                   kind=Adapter, **_):
    """Refuse other settings than those of the adapter at `path`, which stay.

    An alpha of None and targets of all-linear ask for nothing. A rank is only noted, because its
    flag has a default.
    """
    adapter = read_settings(path, kind.peft_entries)
    targets = ",".join(sorted(target_names(lora_target_modules)))
    names = sorted(adapter["target_modules"])
    # Where PEFT would find other modules by the short names, the whole ones are stored.
    if targets != ",".join(names):
        names = sorted({name.split(".")[-1] for name in names})
    for name, asked, stored in (("lora_alpha", lora_alpha, adapter["lora_alpha"]),
                                ("lora_target_modules", targets, ",".join(names))):
        if asked not in (None, "all-linear", stored):
            raise UserError(f"{path}: is an adapter with {name} {stored}, which --{name} {asked} "
                            "cannot change; leave that flag out, or merge the adapter first "
                            "(python lora.py merge)")
    if lora_r not in (0, adapter["r"]):
        print(f"note: {path} is an adapter: its rank {adapter['r']} stays, "
              f"lora_r {lora_r} is for fresh ones", file=sys.stderr)
