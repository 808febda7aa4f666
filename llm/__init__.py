"""From messages to tokens to probabilities: models, chat templates, decoding, memory."""
