"""The model families that can be trained. Each states its differences; the modules beside it hold what they share."""

import dataclasses

from megatron_rl.shared.weights.families.experts import ExpertKeys
from megatron_rl.shared.weights.families.family import Family
from megatron_rl.shared.weights.families.names import (
    ATTENTION,
    DENSE_MLP,
    LATENT_ATTENTION,
    SINKS,
    STEM,
    STEM_WITH_OUTPUT_NORMS,
    experts_mlp,
    linear_attention,
    router_bias,
    shared_expert,
)
from megatron_rl.types import Architecture, RopeKind

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

# Experts, and a shared one with a gate.
_GATED_MLP = experts_mlp("mlp", gate="gate_proj", up="up_proj", down="down_proj") + shared_expert(
    "mlp.shared_expert", gate="mlp.shared_expert_gate"
)
_GATED_EXPERTS = ExpertKeys(
    num_experts=("num_experts",),
    ffn_hidden_size="moe_intermediate_size",
    normalize_weights="norm_topk_prob",
    others={"shared_ffn_hidden_size": "shared_expert_intermediate_size"},
    constants={"has_shared_gate": True},
)

QWEN2_MOE = Family(
    name="qwen2_moe",
    hf_class="Qwen2MoeForCausalLM",
    names=STEM + ATTENTION + _GATED_MLP,
    switches={"qkv_bias": ("qkv_bias",)},
    requires={
        "hidden_act": ("silu",),
        "use_sliding_window": (False,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
    },
    defaults={"qkv_bias": True},
    experts=_GATED_EXPERTS,
)
"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, experts in every layer, and a shared one with a gate."""

# Dense first layers, then experts that a sigmoid with a bias chooses, and a shared one.
_BIASED_MLP = (
    DENSE_MLP
    + experts_mlp("mlp", gate="gate_proj", up="up_proj", down="down_proj")
    + router_bias("mlp.gate.e_score_correction_bias")
    + shared_expert("mlp.shared_experts")
)
_BIASED_EXPERTS = ExpertKeys(
    num_experts=("n_routed_experts", "num_local_experts"),
    ffn_hidden_size="moe_intermediate_size",
    others={
        "num_dense_layers": "first_k_dense_replace",
        "scaling_factor": "routed_scaling_factor",
        "num_groups": "n_group",
        "num_active_groups": "topk_group",
    },
    num_shared="n_shared_experts",
    constants={"score": "sigmoid", "has_bias": True},
)

GLM4_MOE = Family(
    name="glm4_moe",
    hf_class="Glm4MoeForCausalLM",
    names=STEM
    + ATTENTION
    + _BIASED_MLP,
    switches={"qkv_bias": ("attention_bias",), "qk_layernorm": ("use_qk_norm",)},
    requires={"hidden_act": ("silu",), "norm_topk_prob": (True,)},
    defaults={
        "rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.0,
        "n_group": 1, "topk_group": 1,
    },
    experts=_BIASED_EXPERTS,
    has_prediction_layers=True,
    default_rotary_fraction=0.5,
)  # fmt: skip
"""GLM-4.5 to 4.7: the first layers are dense, and a sigmoid with a bias chooses the experts of the others."""

SEED_OSS = Family(
    name="seed_oss",
    hf_class="SeedOssForCausalLM",
    names=STEM + ATTENTION + DENSE_MLP,
    switches={"qkv_bias": ("attention_bias",)},
    requires={
        "hidden_act": ("silu",),
        "attention_out_bias": (False,),
        "mlp_bias": (False,),
        "pretraining_tp": (1, None),
    },
    defaults={"head_dim": 128, "attention_bias": True},
)
"""Seed-OSS: biases of queries, keys and values, and of no other layer."""

ERNIE4_5 = Family(
    name="ernie4_5",
    hf_class="Ernie4_5ForCausalLM",
    names=STEM + ATTENTION + DENSE_MLP,
    # vLLM reads no biases.
    requires={"hidden_act": ("silu",), "use_bias": (False,)},
    defaults={
        "head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True,
    },
    interleaves_rope=True,
)  # fmt: skip
"""ERNIE 4.5 without experts: Llama, in which neighbors rotate as pairs."""

_GATED_ATTENTION = {"qk_layernorm": True, "attention_gate": True, "zero_centered_norms": True}

QWEN3_NEXT = Family(
    name="qwen3_next",
    hf_class="Qwen3NextForCausalLM",
    names=STEM + ATTENTION + linear_attention("in_proj_qkvz", "in_proj_ba") + _GATED_MLP,
    constants=_GATED_ATTENTION,
    requires={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
    },
    defaults={"head_dim": 256, "norm_topk_prob": True, "shared_expert_intermediate_size": 512},
    experts=_GATED_EXPERTS,
    has_prediction_layers=True,
    has_linear_layers=True,
    default_rotary_fraction=0.25,
)
"""Qwen3-Next: gated delta nets among layers of gated attention, and Qwen2-MoE's experts in every layer."""

QWEN3_5 = Family(
    name="qwen3_5_text",
    hf_class="Qwen3_5ForCausalLM",
    names=STEM + ATTENTION + linear_attention("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a") + DENSE_MLP,
    constants=_GATED_ATTENTION,
    requires={"hidden_act": ("silu",), "attention_bias": (False,), "attn_output_gate": (True,)},
    defaults={"head_dim": 256},
    has_prediction_layers=True,
    has_linear_layers=True,
    default_rotary_fraction=0.25,
)
"""Qwen3.5 without its images: Qwen3-Next's layers with an MLP."""

QWEN3_5_MOE = dataclasses.replace(
    QWEN3_5,
    name="qwen3_5_moe_text",
    hf_class="Qwen3_5MoeForCausalLM",
    names=STEM + ATTENTION + linear_attention("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a") + _GATED_MLP,
    # transformers always normalizes.
    requires={**QWEN3_5.requires, "norm_topk_prob": (True,)},
    defaults={
        # No layer has an MLP of this width.
        "intermediate_size": 1,
        "head_dim": 256, "shared_expert_intermediate_size": 512,
    },
    experts=dataclasses.replace(_GATED_EXPERTS, normalize_weights=None),
)  # fmt: skip
"""Qwen3.5 with experts, without its images: Qwen3.5's layers with Qwen3-Next's experts."""

MINIMAX_M2 = Family(
    name="minimax_m2",
    hf_class="MiniMaxM2ForCausalLM",
    names=STEM
    + ATTENTION
    + experts_mlp("block_sparse_moe", gate="w1", up="w3", down="w2")
    + router_bias("block_sparse_moe.e_score_correction_bias"),
    constants={"qk_layernorm": True, "norms_join_heads": True},
    requires={
        "hidden_act": ("silu",),
        "scoring_func": ("sigmoid",),
        "use_routing_bias": (True,),
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "attention_bias": (False,),
        "shared_intermediate_size": (0,),
    },
    needs=("scoring_func", "use_routing_bias"),
    defaults={"head_dim": 128, "num_key_value_heads": 8, "rope_theta": 5e6},
    experts=ExpertKeys(
        num_experts=("num_local_experts", "num_experts"),
        ffn_hidden_size="intermediate_size",
        constants={"score": "sigmoid", "has_bias": True},
    ),
    has_prediction_layers=True,
    default_rotary_fraction=1.0,
    rotary_width_key="rotary_dim",
)
"""MiniMax-M2: experts that a sigmoid with a bias chooses, and norms over all heads of queries and of keys."""

GEMMA3_TEXT = Family(
    name="gemma3_text",
    hf_class="Gemma3ForCausalLM",
    names=STEM_WITH_OUTPUT_NORMS + ATTENTION + DENSE_MLP,
    constants={
        "qk_layernorm": True, "activation": "gelu_tanh", "has_output_norms": True, "zero_centered_norms": True,
        "scales_embedding": True,
    },
    requires={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False,),
        "use_bidirectional_attention": (False,),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
    },
    defaults={
        "head_dim": 256, "num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 1e6,
        "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256,
    },
    has_window=True,
    default_window=4096,
    full_every=6,
    local_base_key="rope_local_base_freq",
    scale_key="query_pre_attn_scalar",
)  # fmt: skip
"""The text models of Gemma 3: a window in most layers, norms after attention and MLP too, and scaled embeddings."""


def _fix_gpt_oss(architecture: Architecture) -> Architecture:
    return dataclasses.replace(
        architecture,
        norm_epsilon=1e-5,
        activation_clamp=7.0,
        tied_embeddings=False,
        full_layers=tuple(range(1, architecture.num_layers, 2)),
        rope=dataclasses.replace(architecture.rope, kind=RopeKind.YARN, attention_factor=None),
    )


GPT_OSS = Family(
    name="gpt_oss",
    hf_class="GptOssForCausalLM",
    names=STEM
    + ATTENTION
    + SINKS
    + experts_mlp("mlp", gate="gate_proj", up="up_proj", down="down_proj", router="router"),
    constants={"linear_bias": True, "has_sinks": True, "activation": "clamped_swiglu"},
    requires={"hidden_act": ("silu",), "attention_bias": (True,), "swiglu_alpha": (1.702,)},
    defaults={
        "head_dim": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "swiglu_limit": 7.0,
    },
    experts=ExpertKeys(num_experts=("num_local_experts", "num_experts"), ffn_hidden_size="intermediate_size"),
    has_window=True,
    default_window=128,
    full_every=2,
    clamp_key="swiglu_limit",
    default_rope={
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    stacks_experts=True,
    fix_in_engines=_fix_gpt_oss,
)  # fmt: skip
"""GPT-OSS: sinks, a window in every other layer, biases everywhere, and experts that clamp."""

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    hf_class="DeepseekV3ForCausalLM",
    names=STEM
    + LATENT_ATTENTION
    + _BIASED_MLP,
    constants={"qk_layernorm": True},
    requires={
        "hidden_act": ("silu",),
        "norm_topk_prob": (True,),
        "topk_method": ("noaux_tc",),
        "scoring_func": ("sigmoid",),
        "moe_layer_freq": (1,),
        "attention_bias": (False,),
        "rope_interleave": (True,),
    },
    needs=("topk_method", "scoring_func"),
    defaults={
        "first_k_dense_replace": 3, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
    },
    experts=_BIASED_EXPERTS,
    has_latents=True,
    has_prediction_layers=True,
)  # fmt: skip
"""DeepSeek-V3 and Moonlight: GLM-4.5's experts, and multi-latent attention."""

GLM4_MOE_LITE = Family(
    name="glm4_moe_lite",
    hf_class="Glm4MoeLiteForCausalLM",
    names=STEM + LATENT_ATTENTION + _BIASED_MLP,
    constants={"qk_layernorm": True},
    requires={
        "hidden_act": ("silu",),
        "norm_topk_prob": (True,),
        "attention_bias": (False,),
        "rope_interleave": (True,),
    },
    defaults={
        "rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.8,
        "n_group": 1, "topk_group": 1,
    },
    experts=_BIASED_EXPERTS,
    has_latents=True,
    has_prediction_layers=True,
)  # fmt: skip
"""GLM-4.7-Flash: as DeepSeek-V3."""

KIMI_K2 = dataclasses.replace(DEEPSEEK_V3, name="kimi_k2")
"""Kimi-K2: DeepSeek-V3 under another name, which engines read too."""

DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    hf_class="DeepseekV2ForCausalLM",
    names=STEM
    + LATENT_ATTENTION
    + DENSE_MLP
    + experts_mlp("mlp", gate="gate_proj", up="up_proj", down="down_proj")
    + shared_expert("mlp.shared_experts"),
    constants={"qk_layernorm": True},
    requires={
        "hidden_act": ("silu",),
        # transformers never normalizes, and vLLM does if this is true.
        "norm_topk_prob": (False,),
        # With one group, they are the same.
        "topk_method": ("group_limited_greedy", "greedy"),
        "scoring_func": ("softmax",),
        "moe_layer_freq": (1,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
    },
    defaults={
        "first_k_dense_replace": 0, "n_shared_experts": 2, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
        "topk_method": "greedy",
    },
    experts=dataclasses.replace(_BIASED_EXPERTS, constants={"normalize_weights": False}),
    has_latents=True,
)  # fmt: skip
"""DeepSeek-V2: DeepSeek-V3's attention, and experts that a softmax chooses, from groups or from all."""

QWEN3_VL = QWEN3.with_images("qwen3_vl", "Qwen3VLForConditionalGeneration", "model.language_model.", "model.visual.")
"""The text of Qwen3-VL: Qwen3."""

QWEN3_5_WITH_IMAGES = QWEN3_5.with_images(
    "qwen3_5", "Qwen3_5ForConditionalGeneration", "model.language_model.", "model.visual."
)
"""The text of Qwen3.5, in folders that hold its vision model."""

GEMMA3 = GEMMA3_TEXT.with_images(
    "gemma3", "Gemma3ForConditionalGeneration", "language_model.model.", "vision_tower.", "multi_modal_projector.",
    # An output layer of its own would have a third prefix.
    requires={**GEMMA3_TEXT.requires, "tie_word_embeddings": (True,)},
    # Released folders leave these out.
    defaults={
        **GEMMA3_TEXT.defaults, "vocab_size": 262208, "num_attention_heads": 8, "max_position_embeddings": 131072,
    },
)  # fmt: skip
"""The text of Gemma 3, in folders that hold its vision model."""

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, MIXTRAL, QWEN2_MOE, GLM4_MOE, SEED_OSS, GEMMA3_TEXT, QWEN3_NEXT,
        QWEN3_5, GPT_OSS, DEEPSEEK_V3, GLM4_MOE_LITE, KIMI_K2, DEEPSEEK_V2, ERNIE4_5, QWEN3_5_MOE, MINIMAX_M2,
        QWEN3_VL, QWEN3_5_WITH_IMAGES, GEMMA3,
    )
}  # fmt: skip
"""The families by name. An architecture without a config.json gets the first family that can express it."""
