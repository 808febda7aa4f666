"""The public names of the library, under the name that it had before core/."""
from core.model import save_model
from core.logprobs import token_logprobs
from layers import load_model

__all__ = ["load_model", "save_model", "token_logprobs"]
