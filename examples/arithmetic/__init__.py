"""A tiny Qwen3 that learns to add: the problems, the model, its supervised warm-up, and the reward of GRPO."""
