"""The table of Megatron's flags, and what their values come to."""
