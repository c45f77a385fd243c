"""What a person starts: the command `megatron-rl`."""
