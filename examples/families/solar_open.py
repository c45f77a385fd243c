"""Solar Open, a family of models that the package does not have.

--hf-model DIR --weights-bridge examples/families/solar_open.py:SOLAR_OPEN
"""

from megatron_rl.shared.weights.families.experts import ExpertKeys
from megatron_rl.shared.weights.families.family import Family
from megatron_rl.shared.weights.families.names import ATTENTION, STEM, experts_mlp, router_bias, shared_expert

SOLAR_OPEN = Family(
    name="solar_open",
    hf_class="SolarOpenForCausalLM",
    names=STEM
    + ATTENTION
    + experts_mlp("mlp", gate="gate_proj", up="up_proj", down="down_proj")
    + router_bias("mlp.gate.e_score_correction_bias")
    + shared_expert("mlp.shared_experts"),
    switches={"qkv_bias": ("attention_bias",)},
    requires={"hidden_act": ("silu",), "norm_topk_prob": (True,)},
    defaults={
        # No layer has an MLP of this width.
        "intermediate_size": 1,
        "rms_norm_eps": 1e-5, "rope_theta": 1e6, "head_dim": 128, "n_shared_experts": 1, "routed_scaling_factor": 1.0,
        "n_group": 1, "topk_group": 1,
    },
    experts=ExpertKeys(
        num_experts=("n_routed_experts", "num_local_experts"),
        ffn_hidden_size="moe_intermediate_size",
        others={"scaling_factor": "routed_scaling_factor", "num_groups": "n_group", "num_active_groups": "topk_group"},
        num_shared="n_shared_experts",
        constants={"score": "sigmoid", "has_bias": True},
    ),
)  # fmt: skip
