"""Comparisons of versions of megatron-core; `tools/run_matrix.py` starts them, in each version's environment."""
