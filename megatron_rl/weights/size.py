"""How large a model is, and how much it computes for a token."""

import dataclasses

from megatron_rl.types import Architecture
from megatron_rl.weights.mapping import Mapping

_EMBEDDING = "model.embed_tokens.weight"


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """What the floating-point operations of a token follow from."""

    num_parameters: int
    num_multiplied: int
    """Parameters that a token is multiplied with: no table of embeddings, and of the experts only its own."""
    attention_width: int
    """Layers times heads times the size of a head: a token computes 4 of these for each token that it sees, forward."""


def measure(architecture: Architecture) -> ModelSize:
    """Count the parameters of a model."""
    specs = Mapping(architecture).manifest()
    experts = architecture.experts
    num_multiplied = 0
    for spec in specs:
        if spec.name == _EMBEDDING and not architecture.tied_embeddings:
            continue
        if experts is not None and ".experts." in spec.name:
            num_multiplied += spec.num_elements * experts.num_active // experts.num_experts
        else:
            num_multiplied += spec.num_elements
    width = architecture.num_layers * architecture.num_attention_heads * architecture.kv_channels
    return ModelSize(sum(spec.num_elements for spec in specs), num_multiplied, width)
