"""What versions of megatron-core are compared in; `tools/run_matrix.py` starts it, in each version's environment."""
