"""vLLM servers that sample: --sampler, --rollout_ahead."""
