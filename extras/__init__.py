"""Optional layers over core/. Each name below is one of core's, with the same signature.

    exact/     signals, locks, sealed checkpoints, bit-exact resume    -> Run, load_model
    show/      notes, bars, --record, report.html, --report_to         -> Run, episode_bar,
                                                                          LayerFlags
    ranks/     torchrun                                                -> Run
    isolate/   a thread and a time-out for each environment            -> sessions
    fast/      fused decoding, CUDA graphs, settings of the processor  -> load_model, make_engine,
               fewer tokens in a forward pass                             pass_order
    memory/    --memory                                                -> load_model, LayerFlags
    launches/  an update in few kernels on a GPU of CUDA               -> load_model, LayerFlags
    models/    families beyond keys and values, the probe at load      -> load_model, make_engine
    rewards/   --rewards                                               -> rewards_of
    vllm/      --sampler, --rollout_ahead                              -> sampler_of, collect_groups
    zoo/       more rows of the tables of grpo.py, ECHO, filters       -> more_rows, RolloutFlags,
                                                                          tokens_to_learn
    serve/     --serve, and a chat that shows turns as they come       -> terminal
    hints/     what was meant by an input that is refused, and where   -> main
    adapters/, data/, sandbox/                                         fill tables of core and envs

Any folder can be deleted: core's own then takes its place.
"""
from dataclasses import make_dataclass
from functools import partial

from core.config import LayerFlags, episode_bar, main, more_rows, terminal
from core.data import collect_groups, pass_order, tokens_to_learn
from core.engine import make_engine, sampler_of
from core.run import Run
from envs import rewards_of
from envs.session import sessions
from envs.tasks import RolloutFlags
from extras.presence import has
from lora import load_model

# Layers of Run are subclasses of core's. Together they are one class, the first one outermost.
runs = []
if has("show"):
    from extras.show.bars import episode_bar  # noqa: F811
    from extras.show.run import Run as Shown
    runs.append(Shown)
if has("exact"):
    from extras.exact.run import Run as Exact
    runs.append(Exact)
if has("ranks"):
    from extras.ranks import Run as Shared
    runs.append(Shared)
if runs:
    Run = type("Run", tuple(runs), {"__doc__": Run.__doc__})

# Flags of layers are in one class, too.
flags = []
if has("show"):
    from extras.show.flags import ShowFlags
    flags.append(ShowFlags)
if has("memory"):
    from extras.memory import MemoryFlags
    flags.append(MemoryFlags)
if has("launches") and has("memory"):
    from extras.launches import LaunchFlags
    flags.append(LaunchFlags)
if flags:
    LayerFlags = make_dataclass("LayerFlags", (), bases=tuple(flags), kw_only=True)

# Layers of load_model and make_engine take the function that they wrap, the last one outermost.
if has("fast"):
    from extras.fast.loading import faster
    load_model = faster(load_model)
if has("memory"):
    from extras.memory import lean
    load_model = lean(load_model)
if has("launches") and has("memory"):
    from extras.launches import with_few_launches
    load_model = with_few_launches(load_model)
if has("exact"):
    from extras.exact.loading import sealed
    load_model = sealed(load_model)
if has("models"):
    from extras.models import make_engine  # noqa: F811
    from extras.models.probe import probed
    load_model = probed(load_model)
if has("fast"):
    from extras import fast
    from extras.fast.order import pass_order  # noqa: F811
    make_engine = partial(fast.make_engine, make=make_engine)

if has("isolate"):
    from extras.isolate import sessions  # noqa: F811
if has("rewards"):
    from extras.rewards import rewards_of  # noqa: F811
if has("vllm"):
    from extras.vllm import collect_groups, sampler_of  # noqa: F811
if has("zoo"):
    from extras.zoo import (RolloutFlags, by_difficulty, more_rows,  # noqa: F811
                            tokens_to_learn)
    collect_groups = by_difficulty(collect_groups)
if has("serve"):
    from extras.serve import terminal  # noqa: F811
if has("hints"):
    from extras.hints import main  # noqa: F811

# These fill tables as they are imported.
if has("adapters"):
    import extras.adapters  # noqa: F401
if has("data"):
    import extras.data  # noqa: F401
if has("sandbox"):
    import extras.sandbox  # noqa: F401

__all__ = ["LayerFlags", "RolloutFlags", "Run", "collect_groups", "episode_bar", "load_model",
           "main", "make_engine", "more_rows", "pass_order", "rewards_of", "sampler_of",
           "sessions", "terminal", "tokens_to_learn"]
