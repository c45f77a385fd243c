"""The commands of `megatron-rl` that check, convert and patch; those that read runs are in `analysis`."""
