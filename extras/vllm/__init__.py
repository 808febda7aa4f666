"""vLLM servers that sample: --sampler, --rollout_ahead.

`sampler_of` overrides core.engine.sampler_of, with the same signature: it returns the servers that
--sampler names, which take the place of the engine in this process. `collect_groups` overrides that
of core.data. Importing this package also lets `fill` settle what these flags ask of grpo.py.
"""
import core.data
from core.config import FILLED, UserError


def sampler_of(config, run=None):
    """Return the servers that --sampler names, or None: this process samples."""
    if getattr(config, "sampler", None):
        # Other runs need neither requests over HTTP nor the proof.
        from extras.vllm.servers import servers_of
        return servers_of(config.sampler, run)


def collect_groups(play, tasks, config, step, run):
    """Do what core's does. With --rollout_ahead the groups have been played in the step before."""
    if not getattr(config, "rollout_ahead", 0):
        return core.data.collect_groups(play, tasks, config, step, run)
    # Other runs need no thread that plays.
    from extras.vllm.ahead import collect_ahead
    return collect_ahead(play, tasks, config, step, run)


def settle(config):
    """Fill in --importance_correction beside --sampler, and refuse --rollout_ahead without it."""
    if getattr(config, "rollout_ahead", 0) and not config.sampler:
        raise UserError("--rollout_ahead needs --sampler: this process's engine plays with the "
                        "weights that the update changes")
    # Another engine rounds differently. 2 is the cap of verl's examples. vespo has its own weight,
    # and the masks of dppo and deepseek compare the policy with what has sampled.
    is_open = getattr(config, "importance_correction", 0.0) is None
    if is_open and config.sampler and config.loss not in ("vespo", "dppo", "deepseek"):
        config.importance_correction = 2.0


FILLED.append(settle)
