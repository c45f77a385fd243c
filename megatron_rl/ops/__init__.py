"""Tensor operations with a naive twin each: shared-prompt attention, vocabulary-parallel log-probs."""
