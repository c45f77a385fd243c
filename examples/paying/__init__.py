"""A game over several turns that a tiny model learns to play."""
