"""The training objective: advantages, losses, corrections. Pure functions of tensors, independent of ranks."""
