"""The OpenAI-compatible server, and the chat in a terminal."""
