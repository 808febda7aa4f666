"""Before torch is imported: one thread a worker, and no spinning, or parallel tests slow each other a hundredfold."""
import os
import sys
from pathlib import Path

import pytest

# Tests of a layer share cases with those of core: a test module is found from every folder.
sys.path += sorted(str(folder) for folder in Path(__file__).parent.rglob("[a-z]*") if any(folder.glob("test_*.py")))

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # tests compare bits, and are of the CPU; bench/gpu.py is of the GPU

import layers  # noqa: E402, F401  what extras/ adds to the tables of core/ and envs/


@pytest.fixture(autouse=True)
def notes_anew():
    """What is said once is said once in each test, whatever ran before it."""
    from core.config import say_once
    say_once.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def few_held_out():
    """A hundred demonstrations to evaluate take longer than the few steps of a test's run."""
    import episodes
    episodes.HELD_OUT = 8


@pytest.fixture(scope="module")
def probed_once():
    """Probe one model of each kind, for files that load theirs again and again: the others differ from it in their weights alone.

    Weights that are not finite are for the probe to find.
    """
    if not (Path(__file__).parents[1] / "extras" / "models").is_dir():
        yield  # core loads without a probe
        return
    from extras.models import probe as probing
    from core.model import facts
    seen = {}

    def once(model, source, probe=probing.probe):
        kind = repr((model, model.config, facts(model).techniques, {(p.dtype, p.device) for p in model.parameters()}))
        if kind not in seen or not all(p.isfinite().all() for p in model.parameters()):
            probe(model, source)
            seen[kind] = facts(model)
        for name in ("shares_prefix", "refuses_engine", "token_bytes", "state_bytes"):
            setattr(facts(model), name, getattr(seen[kind], name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probing, "probe", once)
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folder of a tiny model."""
    from saving import save_tiny
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Folder of a Qwen2 whose tensors are large enough to dominate a step's memory."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    from core.tiny import make_tiny
    folder = str(tmp_path_factory.mktemp("wide"))
    AutoModelForCausalLM.from_config(Qwen2Config(
        vocab_size=6000, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, tie_word_embeddings=True)).save_pretrained(folder)
    make_tiny()[1].save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def python(tmp_path_factory):
    """python(*words, cwd=folder) runs `python *words` there. Returns its returncode, stdout and stderr."""
    import programs
    bare = programs.Bare(tmp_path_factory.mktemp("streams"))
    yield bare.run
    bare.close()


@pytest.fixture(scope="session")
def schooled(tmp_path_factory):
    """Folder of the tiny model that knows the format of the bandit, and chooses at random. Workers share it."""
    import bandit
    place = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent
    from filelock import FileLock  # transformers needs it, too
    with FileLock(place / "schooled.lock"):  # of two workers the second one waits for the first one's
        folder = place / "schooled"
        return bandit.school(folder) if not (folder / "result.json").exists() else str(folder)
