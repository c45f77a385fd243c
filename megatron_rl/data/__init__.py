"""From prompts and responses to packs, one per micro-batch."""
