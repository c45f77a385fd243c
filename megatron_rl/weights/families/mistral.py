"""Mistral, with or without its sliding window."""

from megatron_rl.weights.families.family import ATTENTION, DENSE_MLP, STEM, Family

FAMILY = Family(
    name="mistral",
    hf_class="MistralForCausalLM",
    names=STEM + ATTENTION + DENSE_MLP,
    requires={"hidden_act": ("silu",)},
    has_window=True,
    default_window=4096,
)
