"""Supervised fine-tuning (--stage sft): the loop without a sidecar, and its parts."""
