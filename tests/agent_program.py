"""`python agent.py` as a module: its Config and its command with the layers."""
import agent
import talk
from layers import terminal

# A test may replace talk.load_model.
Config, run = terminal(talk.Config, talk.command, agent, lambda *path, **options: talk.load_model(*path, **options))
