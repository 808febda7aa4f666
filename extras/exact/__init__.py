"""A run that continues bit for bit, whatever ended it.

    run.py            Run overrides core.run.Run: lock, signals, exact resume, files of bad steps
    output_folder.py  who may write in a folder, and how its log of episodes is thinned
    checkpoint.py     checkpoints with the sha256 of their files, and of what the run began with
    environments.py   the files that define an environment
    resuming.py       what a run must have in common with the one it continues
    loading.py        sealed(load_model) overrides lora.load_model: checkpoints are verified
    process.py        the signals that end a program, and what a full disk or memory says
    files.py          files that are flushed, and fingerprints

A signal stops a run before the first update of a step or at the end of the step. What ends a run
early saves the last whole step. No line of a training loop knows this layer: that an update has
begun it learns from a hook of the optimizer. Importing it lets `core.config.main` handle signals. A
checkpoint that core alone has written is continued, too, with a line that it is not verified.
"""
from core.config import AROUND, CHANGED
from extras.exact.process import Signals

AROUND.append(Signals)
CHANGED["save_every"] = {"help": (
    "steps between checkpoints, of which the last two and the best stay; 0: after 10 minutes of "
    "training each, and at the end; an evaluated step is saved, too")}
