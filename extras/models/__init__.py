"""Families of models beyond keys and values, and the probe at load."""
