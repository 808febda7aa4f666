"""Environments of other packages: TRL, Gymnasium, Reasoning Gym, verifiers."""
