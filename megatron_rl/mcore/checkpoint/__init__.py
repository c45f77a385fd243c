"""Megatron's distributed checkpoints: what they hold, where they lie, when they are whole."""
