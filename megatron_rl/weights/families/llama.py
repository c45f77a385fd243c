"""Llama 2 and 3."""

from megatron_rl.weights.families.family import ATTENTION, DENSE_MLP, STEM, Family

FAMILY = Family(
    name="llama",
    hf_class="LlamaForCausalLM",
    names=STEM + ATTENTION + DENSE_MLP,
    switches={"linear_bias": ("attention_bias", "mlp_bias")},
    # Above 1 it names a way of slicing the weights, which changes the order of sums.
    requires={"hidden_act": ("silu",), "pretraining_tp": (1, None)},
)
