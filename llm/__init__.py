"""Language models: from messages to tokens to probabilities."""
from llm.loading import load_model, save_model
from llm.logprobs import token_logprobs

__all__ = ["load_model", "save_model", "token_logprobs"]
