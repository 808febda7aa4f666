"""The same numbers in less time, but for rounding."""
