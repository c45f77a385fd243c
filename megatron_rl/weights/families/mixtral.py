"""Mixtral: Mistral's attention, experts in every layer; the experts' weights always sum to one."""

from megatron_rl.weights.families.family import ATTENTION, STEM, ExpertKeys, Family, experts_mlp

FAMILY = Family(
    name="mixtral",
    hf_class="MixtralForCausalLM",
    names=STEM + ATTENTION + experts_mlp("block_sparse_moe", gate="w1", up="w3", down="w2"),
    requires={"hidden_act": ("silu",)},
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    experts=ExpertKeys(num_experts=("num_local_experts",), ffn_hidden_size="intermediate_size"),
    has_window=True,
)
