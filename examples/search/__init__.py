"""A tiny model that learns to search an index."""
