"""A tiny model that learns to call a calculator."""
