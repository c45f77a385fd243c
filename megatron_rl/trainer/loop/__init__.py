"""The loop: the parts built from settings, the trainer, and what ends all ranks when one is gone."""
