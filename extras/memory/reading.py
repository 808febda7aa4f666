"""Reading a model in the form in which its weights will stay: 4 bits, int8, in host memory."""
import torch

from core.model import from_pretrained
from core.tiny import make_tiny
from extras.memory.folders import auto_class, check_kind, check_stored, read_complete


class Reader:
    """The `read` of `lora.load_model`.

    Attributes:
        chosen: the `Techniques` of the model.
        quantized: the forms that the weights are rounded to and not held in, as an adapter's file
            names them, "" for none.
        stream: brings the weights of streamed layers, None without.
    """

    def __init__(self, chosen, quantized: str = ""):
        self.chosen = chosen
        self.quantized = quantized
        self.stream = None

    def __call__(self, source, dtype, device, seed):
        """Return the model and tokenizer of a folder, of a hub id, or the tiny ones."""
        dtype = real_dtype(dtype, device)
        if source == "tiny" and self.is_sparing(device):
            from extras.memory.skeleton import fill, skeleton
            made, tokenizer = make_tiny(seed)
            model = skeleton(made.config, made.dtype if dtype == "auto" else dtype)
            fill(model, made.to(model.dtype).state_dict().__getitem__, device, self.chosen)
        else:
            model, tokenizer = read_complete(source, dtype, device, seed, self.read_weights)
        if self.quantized:
            from extras.memory.quantization import round_weights
            round_weights(model.to(device), self.quantized)
        if self.chosen.stream_layers:
            from extras.memory.checkpointing import layers_of
            from extras.memory.streaming import Stream
            self.stream = Stream(layers_of(model), device)
        return model, tokenizer

    def is_sparing(self, device) -> bool:
        """True if the weights are read one at a time. On the meta device there are shapes only."""
        return self.chosen.frozen_base or device.type == "meta"

    def read_weights(self, folder, config, dtype, device):
        """Return the model of a folder with this config."""
        check_kind(folder, config)
        check_stored(folder)
        if not self.is_sparing(device):
            return from_pretrained(folder, config, dtype, device, auto_class(config))
        # Its imports are of transformers' own ways of reading.
        from extras.memory.skeleton import read_by_tensor
        stored = real_dtype(config.dtype or torch.float32, device)
        dtype = stored if dtype == "auto" else dtype
        return read_by_tensor(folder, config, dtype, device, self.chosen)


def real_dtype(dtype, device):
    """Return float16 in place of bfloat16 on a GPU that only emulates it (before Ampere)."""
    if dtype == torch.bfloat16 and device.type == "cuda":
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.float16
    return dtype
