"""Differences between engines and the definition of their policy: where they arise, and what they do to log-probs."""
