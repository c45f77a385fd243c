"""Tensor operations, each with a naive twin: shared-prompt attention, and vocabulary-parallel log-probs."""
