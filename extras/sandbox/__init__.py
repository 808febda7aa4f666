"""A model's Python, confined by the kernel."""
