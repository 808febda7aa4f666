"""The optional layers, in one place: each name is core's, or what extras/ makes of it.

Delete the folder extras/, one folder in it, or a line below: core's own takes its place, with the
same signature, and every program runs and learns without that layer.
"""
from functools import partial

from core.loading import load_model
from core.run import Run
from extras import fast, models

make_engine = partial(fast.make_engine, make=models.make_engine)

__all__ = ["Run", "load_model", "make_engine"]
