"""An agent of the openai client alone, which a tiny model learns to act for."""
