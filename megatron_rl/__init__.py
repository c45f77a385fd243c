"""GRPO on Megatron: periodically asynchronous, strictly on-policy."""

__version__ = "0.1.0"
