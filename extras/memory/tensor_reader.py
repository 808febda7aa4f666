"""Read the tensors of a model folder one at a time, under the names that the model gives them.

What transformers joins while it reads is joined here too, by its own rules: the experts of a layer,
which a checkpoint holds one by one, are one parameter of the model.
"""
from collections import defaultdict
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (WeightConverter, WeightRenaming, dot_natural_key,
                                             rename_source_key)

from core.data import read_json
from core.config import UserError


def tensor_reader(folder: str, model):
    """Return a function that reads one parameter of a skeleton by its name, in the dtype to keep.

    It raises UserError if the folder has no such parameter, or two values for a tied one.
    """
    changes = get_model_conversion_mapping(model)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    parameters = model.state_dict()
    float32_names = model._get_dtype_plan(model.dtype)
    sources_of = defaultdict(list)  # name -> (stored name, pattern that it matched, file) of each
    # Other files may be shards of an older version. Transformers reads the whole file, if there is
    # one, or what the index names.
    paths = [Path(folder, "model.safetensors")]
    index = Path(folder, "model.safetensors.index.json")
    if not paths[0].exists():
        paths = Path(folder).glob("model*.safetensors")
        if index.exists():
            paths = {Path(folder, name) for name in read_json(index)["weight_map"].values()}
    for path in paths:
        file = safe_open(path, "pt")
        for stored in file.keys():
            name, pattern = rename_source_key(
                stored, renamings, converters, model.base_model_prefix, parameters)
            sources_of[name].append((stored, pattern, file))

    def read(name):
        if name not in sources_of:
            raise UserError(
                f"{folder}: no weights for {name}: the model is incomplete, or stored in another "
                "form, which --load_in_4bit and --memory 4bit, small and stream do not read")
        # The experts in their order, 10 after 9. They may lie in several files.
        sources = sorted(sources_of[name], key=lambda source: dot_natural_key(source[0]))
        stored, pattern, file = sources[0]
        # Transformers keeps some in float32, such as the biases of a router.
        is_float32 = any(word in name for word in float32_names)
        dtype = torch.float32 if is_float32 else parameters[name].dtype
        if not pattern:
            if file.get_slice(stored).get_shape() != list(parameters[name].shape):
                raise UserError(f"{folder}: {name} has another shape than its config.json says")
            return file.get_tensor(stored).to(dtype)
        converter = deepcopy(next(c for c in converters if pattern in c.source_patterns))
        for stored, pattern, file in sources:
            converter.add_tensor(name, stored, pattern, partial(file.get_tensor, stored))
        return converter.convert(name, model=model, config=model.config)[name].to(dtype)

    for name, other in model.all_tied_weights_keys.items():
        # Transformers does not tie such a pair, whatever config.json says.
        if sources_of.keys() >= {name, other} and not torch.equal(read(name), read(other)):
            raise UserError(f"{folder}: its config.json ties {name} to {other}, but they differ: "
                            "set tie_word_embeddings to false there")
    return read
