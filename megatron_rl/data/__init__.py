"""From prompts and responses to the packs that a micro-batch is made of."""
