"""A run that continues bit for bit, whatever ended it.

Importing it lets `core.config.main` handle signals, and say in one line that the disk is full or
the memory was too small.
"""
from core.config import AROUND
from extras.exact.process import Signals

AROUND.append(Signals)
