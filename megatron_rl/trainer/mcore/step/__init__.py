"""A step: micro-batches through Megatron's schedules, the losses of their roles, the optimizer."""
