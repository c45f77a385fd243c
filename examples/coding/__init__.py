"""Code as a response, and tests as the reward: a tiny model learns to write what it is told."""
