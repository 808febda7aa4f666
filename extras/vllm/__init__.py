"""vLLM servers that sample: --sampler, --rollout_ahead.

`sampler_of` overrides core.engine.sampler_of, with the same signature: it returns the servers that
--sampler names, which take the place of the engine in this process.
"""


def sampler_of(config, run=None):
    """Return the servers that --sampler names, or None: this process samples."""
    if getattr(config, "sampler", None):
        # Other runs need neither requests over HTTP nor the proof.
        from extras.vllm.servers import servers_of
        return servers_of(config.sampler, run)
