"""Weights on their way between Hugging Face checkpoints and Megatron's shards: names, import, export, fingerprint."""
