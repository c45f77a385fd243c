"""Confined processes that run the user's code: reward functions, environments and agents."""
