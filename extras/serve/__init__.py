"""The OpenAI-compatible server: `python agent.py --serve`.

    POST /v1/chat/completions   messages, tools, stream, n, seed, stop
    POST /v1/completions        texts or token ids; with return_token_ids also ids out, as in vLLM
    POST /v1/load_lora_adapter, /v1/unload_lora_adapter     {"lora_name", "lora_path"}
    POST /solve                 {"problem"}: the agent plays its environment, its tools really run
    GET  /v1/models, /healthz

Another machine's run can have its episodes sampled here: `grpo.py --sampler http://host:8000`.

layers.py gives agent.py `serve`, in place of core's, which only says what is missing.
"""
from core.config import UserError

LOCAL = ["127.0.0.1", "localhost"]  # what may be served without a token


def serve(config, model, tokenizer, begin):
    """Answer requests until a signal ends the process.

    Args:
        config: of agent.py.
        begin: called with the text of a task, it returns the `agent.Episode` that plays it.
    """
    if config.host not in LOCAL and not config.token:
        raise UserError(f"--host {config.host}: others can reach it, so give a --token")
    try:
        # FastAPI is not installed everywhere.
        from extras.serve.server import run
    except ImportError as error:
        raise UserError(f'--serve needs "pip install -U fastapi uvicorn" ({error})') from None
    run(config, model, tokenizer, begin)
