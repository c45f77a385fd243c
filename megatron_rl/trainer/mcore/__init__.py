"""All code that touches megatron-core: session, model, step, publishing, checkpoints, configuration."""
