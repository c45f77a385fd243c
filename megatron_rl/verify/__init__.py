"""Proof that a vLLM server of anybody's holds the weights of a folder, bit for bit."""
