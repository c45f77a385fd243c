"""Qwen3-MoE: Qwen3's attention, experts in every layer."""

from megatron_rl.weights.families.family import ATTENTION, STEM, ExpertKeys, Family, experts_mlp

FAMILY = Family(
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
