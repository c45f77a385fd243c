"""Environments that a policy acts in, turn after turn: classes of the user's own, run in confined processes."""
