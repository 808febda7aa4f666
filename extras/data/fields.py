"""What Python code may give to the fields of a Config beside text, and data sets of the hub."""
import json

from core.config import named

LISTS = ("dataset", "eval_dataset", "tasks")  # flags that may hold a list of rows


def write_as_text(config):
    """Write the objects that Python code gave to a config as text, which config.yaml holds.

    They are lists of rows, a datasets.Dataset, dicts and NumPy's numbers.
    """
    for name, value in vars(config).items():
        if isinstance(value, dict):
            # Of these the str() would be read as text.
            values = {named(key): json.dumps(item) if isinstance(item, bool | list | dict | None)
                      else item for key, item in value.items()}
            value = ",".join(f"{key}={item}" for key, item in values.items())
        elif name in LISTS and not isinstance(value, str | None):
            value = json.dumps(value if isinstance(value, list) else value.to_list())
        elif hasattr(value, "item"):
            value = value.item()
        setattr(config, name, value)


def pin_revisions(config):
    """Write the revision of every data set of the hub into a config, which a resumed run compares.

    So config.yaml repeats a run with the same rows, whatever its authors change afterwards.
    """
    if not any("hub:" in str(value) for value in vars(config).values()):
        return
    # Most runs name no data sets.
    from extras.data.mixtures import data_sources
    from extras.data.tables import pinned
    for name in LISTS:
        texts = []
        for source, weight in data_sources(vars(config).get(name)):
            text = pinned(source) if source.startswith("hub:") else source
            texts.append(text if weight is None else f"{text}={weight:g}")
        if texts:
            setattr(config, name, ",".join(texts))
