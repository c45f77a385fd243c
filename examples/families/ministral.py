"""Ministral, a family of models that the package does not have.

--hf-model DIR --weights-bridge examples/families/ministral.py:MINISTRAL
"""

from megatron_rl.shared.weights.families.family import Family
from megatron_rl.shared.weights.families.names import ATTENTION, DENSE_MLP, STEM

MINISTRAL = Family(
    name="ministral",
    hf_class="MinistralForCausalLM",
    names=STEM + ATTENTION + DENSE_MLP,
    requires={"hidden_act": ("silu",)},
    has_window=True,
    default_window=4096,
    # Without layer_types every layer has the window.
    full_every=10**6,
)
