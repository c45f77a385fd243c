"""Supervised fine-tuning (--stage sft): iterations without a sidecar."""
