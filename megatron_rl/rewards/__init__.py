"""Rewards: users' own functions, run in confined processes, and the ready-made ones."""
