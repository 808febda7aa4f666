"""Language models: from messages to tokens to probabilities. These names are the public interface.

Modules inside the package import each other by their full names and never from here.
"""
from llm.adapter_files import TrainingState, adamw, save_model
from llm.batches import (batches_of_like_length, cheapest_order, per_token, shuffled_batches,
                         turn_index)
from llm.loading import is_tiny, load_model, merge, model_options
from llm.logprobs import score, token_logprobs
