"""The model families that can be trained. Each states its differences; `family.py` holds what they share."""

from megatron_rl.shared.weights.families.family import ATTENTION, DENSE_MLP, STEM, ExpertKeys, Family, experts_mlp

LLAMA = Family(
    name="llama",
    hf_class="LlamaForCausalLM",
    names=STEM + ATTENTION + DENSE_MLP,
    switches={"linear_bias": ("attention_bias", "mlp_bias")},
    # Above 1 it names a way of slicing the weights, which changes the order of sums.
    requires={"hidden_act": ("silu",), "pretraining_tp": (1, None)},
)
"""Llama 2 and 3."""

MISTRAL = Family(
    name="mistral",
    hf_class="MistralForCausalLM",
    names=STEM + ATTENTION + DENSE_MLP,
    requires={"hidden_act": ("silu",)},
    has_window=True,
    default_window=4096,
)
"""Mistral, with or without its sliding window."""

QWEN2 = Family(
    name="qwen2",
    hf_class="Qwen2ForCausalLM",
    names=STEM + ATTENTION + DENSE_MLP,
    constants={"qkv_bias": True},
    # A window on some of the layers only is not the same as a window on all of them.
    requires={"hidden_act": ("silu",), "use_sliding_window": (False,)},
)
"""Qwen2 and Qwen2.5: queries, keys and values have biases, the other linear layers have none."""

QWEN3 = Family(
    name="qwen3",
    hf_class="Qwen3ForCausalLM",
    names=STEM + ATTENTION + DENSE_MLP,
    constants={"qk_layernorm": True},
    requires={"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,)},
    defaults={"head_dim": 128},
)
"""Qwen3: queries and keys are normalized head by head."""

QWEN3_MOE = Family(
    name="qwen3_moe",
    hf_class="Qwen3MoeForCausalLM",
    names=STEM + ATTENTION + experts_mlp("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    constants={"qk_layernorm": True},
    # Dense layers among the sparse ones have tensors of other names and another width.
    requires={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "use_sliding_window": (False,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
    },
    experts=ExpertKeys(
        num_experts=("num_experts", "num_local_experts"),
        ffn_hidden_size="moe_intermediate_size",
        normalize_weights="norm_topk_prob",
    ),
)
"""Qwen3-MoE: Qwen3's attention, experts in every layer."""

MIXTRAL = Family(
    name="mixtral",
    hf_class="MixtralForCausalLM",
    names=STEM + ATTENTION + experts_mlp("block_sparse_moe", gate="w1", up="w3", down="w2"),
    requires={"hidden_act": ("silu",)},
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    experts=ExpertKeys(num_experts=("num_local_experts",), ffn_hidden_size="intermediate_size"),
    has_window=True,
)
"""Mixtral: Mistral's attention, experts in every layer; the experts' weights always sum to one."""

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, MIXTRAL)}
"""The families by name. An architecture without a config.json gets the first family that can express it."""
