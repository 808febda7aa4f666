"""What is traded for memory: --memory."""
from dataclasses import dataclass

from core.config import LayerFlags, flag


@dataclass(kw_only=True)
class MemoryFlags(LayerFlags):
    heading = "memory"
    memory: str = flag("plain", "what is traded for memory; bench/memory.py counts every setting",
                       choices=("plain", "checkpoint", "4bit", "small", "stream"))
    load_in_4bit: bool = flag(False, "keep the frozen weights in NF4 with double quantization")
    gradient_checkpointing: bool = flag(
        False, "recompute the layers in the backward pass: a third more time")
