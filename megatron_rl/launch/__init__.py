"""Starts a run on many hosts by their scheduler: `megatron-rl launch`."""
