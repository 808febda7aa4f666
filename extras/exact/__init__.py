"""A run that continues bit for bit, whatever ended it."""
