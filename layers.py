"""The optional layers, in one place: each name is core's, or what extras/ makes of it.

Delete the folder extras/, one folder in it, or a line below: core's own takes its place, with the
same signature, and every program runs and learns without that layer.
"""
import lora
from core.engine import make_engine
from core.run import Run
from extras.exact.loading import sealed
from extras.fast.loading import faster
from extras.memory import MemoryFlags as LayerFlags
from extras.memory import lean
from extras.models.probe import probed

load_model = probed(sealed(lean(faster(lora.load_model))))

__all__ = ["LayerFlags", "Run", "load_model", "make_engine"]
