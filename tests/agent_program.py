"""`python agent.py` as a module: its Config and its command with the layers."""
import agent
from layers import terminal

Config, run = terminal(agent.Config, agent.command, agent)
