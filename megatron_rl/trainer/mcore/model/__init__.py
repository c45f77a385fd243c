"""The model: megatron-core's GPTModel fed with packs, its weights, and models that are not trained."""
