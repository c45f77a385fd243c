"""What is maximized: advantages, losses, corrections. Pure functions of tensors; nothing here knows of ranks."""
