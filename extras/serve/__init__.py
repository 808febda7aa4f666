"""The OpenAI-compatible server: `python agent.py --serve`.

    POST /v1/chat/completions   messages, tools, tool_choice, stream, seed, stop
    POST /v1/completions        token ids in and out
    POST /v1/load_lora_adapter, /v1/unload_lora_adapter     {"lora_name", "lora_path"}
    POST /solve                 {"problem"}: the agent plays its environment, its tools really run;
                                "solution" is what it answered, in text or by its last call
    GET  /v1/models, /healthz

Another machine's run can have its episodes sampled here: `grpo.py --sampler http://host:8000`.

`terminal` overrides core.config.terminal, with the same signature: what agent.py does then has the
settings of the run that wrote the model (settings.py), and a chat that shows turns as they come and
keeps a conversation in its cache (chat.py).
"""


def terminal(config_class, command, agent, load_model):
    """Return the Config and command of `python agent.py`, given those of core and the module."""
    # No other program reads it.
    from extras.serve.chat import extended
    return extended(config_class, agent, load_model)
