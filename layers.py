"""The optional layers, in one place: each name is core's, or what extras/ makes of it.

Delete the folder extras/ or one folder in it: core's own takes its place, with the same signature,
and every program runs and learns without that layer.
"""
from pathlib import Path

from core.config import LayerFlags, episode_bar, main, more_rows, terminal
from core.data import collect_groups, pass_order, tokens_to_learn
from core.engine import make_engine, sampler_of
from core.run import Run
from envs import rewards_of
from envs.session import sessions
from envs.tasks import RolloutFlags
from lora import load_model

if Path(__file__).with_name("extras").is_dir():  # PyPI has a package "extras", too
    from extras import (LayerFlags, RolloutFlags, Run, collect_groups, episode_bar, load_model,
                        main, make_engine, more_rows, pass_order, rewards_of, sampler_of,
                        sessions, terminal, tokens_to_learn)

__all__ = ["LayerFlags", "RolloutFlags", "Run", "collect_groups", "episode_bar", "load_model",
           "main", "make_engine", "more_rows", "pass_order", "rewards_of", "sampler_of",
           "sessions", "terminal", "tokens_to_learn"]
