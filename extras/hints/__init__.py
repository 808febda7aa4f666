"""What an input means that is wrong, or written for another library.

    command_line.py  parse overrides core.config.parse: help in groups, what is wrong, and where
    refusals.py      what was meant by an unknown flag
    synonyms.txt     our flags: their names in TRL, transformers, PEFT, verl and OpenRLHF. Also
                     layers: the flags that need them, with the values that ask for nothing

Importing it gives words to what the reading of a file may raise, and lets `fill` refuse flags of
grpo.py that clash.
"""
import json
import sys

import yaml

import core.config
from core.config import FILLED, UserError, reason
from extras.hints.command_line import parse

__all__ = ["main"]


def main(config_class, train, doc):
    """Override core.config.main: the command line is explained, and any bytes can be typed."""
    # Without them a file that is opened later would get their numbers, and what is written there.
    if None in (sys.stdout, sys.stderr):
        print(core.config.shown("standard output or standard error is closed; redirect it, for "
                                "instance to /dev/null"), file=sys.stderr)
        sys.exit(UserError.code)
    if hasattr(sys.stdin, "reconfigure"):  # that of a test has not
        sys.stdin.reconfigure(errors="replace")
    core.config.main(config_class, train, doc, parse)


def check_grpo(config):
    """Raise UserError for flags of grpo.py and distill.py that clash. Others do not have them."""
    if not hasattr(config, "updates_per_step"):
        return
    if getattr(config, "success_rate_lb", 0) > getattr(config, "success_rate_ub", 1):
        raise UserError("--success_rate_lb is above --success_rate_ub: no group lies between")
    if getattr(config, "loss", "") == "vespo" and config.importance_correction:
        raise UserError("--importance_correction: vespo weights by policy / sampler; leave it out")
    # batch_size decides memory, rounding and what dropout draws; accumulation has to agree with it.
    sequences = config.tasks_per_step * config.group_size
    size, passes = config.batch_size, config.gradient_accumulation_steps
    if passes and size * passes != sequences:
        raise UserError(f"a step has {sequences} sequences, but batch_size {size} x "
                        f"gradient_accumulation_steps {passes} = {size * passes}")


FILLED.append(check_grpo)


@reason.register
def _(error: KeyError, path):
    return f"no {error} in it"


@reason.register
def _(error: UnicodeDecodeError, path):
    return f"byte 0x{error.object[error.start]:02x} is not UTF-8; save the file as UTF-8"


@reason.register
def _(error: json.JSONDecodeError, path):
    return f"not JSON: {error.msg} at column {error.colno}"


@reason.register
def _(error: OSError, path):
    # Of another file, such as one of the hub's cache, the error itself says which.
    if error.strerror and error.filename in (None, str(path)):
        return error.strerror
    return reason.dispatch(object)(error, path)


@reason.register
def _(error: yaml.MarkedYAMLError, path):
    raise UserError(f"{path}:{error.problem_mark.line + 1}: cannot be read as YAML: "
                    f"{error.problem}")
