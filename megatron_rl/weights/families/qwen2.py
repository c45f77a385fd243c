"""Qwen2 and Qwen2.5: queries, keys and values have biases, the other linear layers have none."""

from megatron_rl.weights.families.family import ATTENTION, DENSE_MLP, STEM, Family

FAMILY = Family(
    name="qwen2",
    hf_class="Qwen2ForCausalLM",
    names=STEM + ATTENTION + DENSE_MLP,
    constants={"qkv_bias": True},
    # A window on some of the layers only is not the same as a window on all of them.
    requires={"hidden_act": ("silu",), "use_sliding_window": (False,)},
)
