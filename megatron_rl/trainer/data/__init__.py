"""The data of a run: prompts and demonstrations, their order, and the packs that micro-batches are made of."""
