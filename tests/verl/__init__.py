"""verl's weight sync into a real vLLM."""
