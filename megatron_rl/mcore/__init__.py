"""Everything that touches megatron-core: session, model, configuration."""
