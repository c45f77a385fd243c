"""Qwen3: queries and keys are normalized head by head."""

from megatron_rl.weights.families.family import ATTENTION, DENSE_MLP, STEM, Family

FAMILY = Family(
    name="qwen3",
    hf_class="Qwen3ForCausalLM",
    names=STEM + ATTENTION + DENSE_MLP,
    constants={"qk_layernorm": True},
    requires={"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,)},
    defaults={"head_dim": 128},
)
