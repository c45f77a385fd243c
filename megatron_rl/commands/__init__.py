"""The subcommands of the command `megatron-rl`."""
