"""Optional layers over core/. Each folder can be deleted."""
