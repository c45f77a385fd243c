"""The training objective: advantages, losses, corrections. Pure functions of tensors; nothing here knows of ranks."""
