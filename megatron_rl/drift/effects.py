"""The effects of errors on log-probs: the definition's forward pass in float64, with the errors of some parts added."""

from collections.abc import Mapping, Sequence

import torch

from megatron_rl.drift.definition import Definition, score_tokens
from megatron_rl.shared.records.model_parts import JOINED, LayerPart, ModelPart, Tensors

Errors = Mapping[LayerPart, Tensors]
"""For each point, the outputs of a recorded part less those of its definition from the same inputs."""


def propagate_errors(
    definition: Definition, tokens: Sequence[int], num_sampled: int, temperature: float, errors: Errors
) -> torch.Tensor:
    """Compute the log-probs of the last `num_sampled` tokens, with the errors added where they arose."""
    tokens_T = torch.tensor(tokens)
    positions_T = torch.arange(len(tokens))

    def compute(part: ModelPart, layer: int, **given: torch.Tensor) -> dict[str, torch.Tensor]:
        found = definition.compute(LayerPart(part, layer), given)
        for recorded_as in {part, JOINED.get(part, part)}:
            for name, error in errors.get(LayerPart(recorded_as, layer), {}).items():
                # The last token is fed to no engine: its row decides nothing.
                found[name][: len(error)] += error
        return found

    hidden = compute(ModelPart.EMBEDDING, -1, tokens=tokens_T)["out"]
    for number, layer in enumerate(definition.base.layers):
        normed = compute(ModelPart.ATTENTION_NORM, number, **{"in": hidden})["out"]
        products = compute(ModelPart.QKV, number, **{"in": normed})
        queries, keys, values = (products[name] for name in ("queries", "keys", "values"))
        if hasattr(layer.self_attn, "q_norm"):
            queries = compute(ModelPart.QUERY_NORM, number, **{"in": queries})["out"]
            keys = compute(ModelPart.KEY_NORM, number, **{"in": keys})["out"]
        rotated = compute(ModelPart.ROTATION, number, positions=positions_T, queries=queries, keys=keys)
        attended = compute(
            ModelPart.ATTENTION, number, queries=rotated["rotated queries"], keys=rotated["rotated keys"], values=values
        )["out"]
        hidden = hidden + compute(ModelPart.ATTENTION_OUTPUT, number, **{"in": attended})["out"]
        normed = compute(ModelPart.MLP_NORM, number, **{"in": hidden})["out"]
        if hasattr(layer.mlp, "experts"):
            hidden = hidden + compute(ModelPart.EXPERTS, number, **{"in": normed})["out"]
            continue
        widened = compute(ModelPart.GATE_UP, number, **{"in": normed})
        active = compute(ModelPart.ACTIVATION, number, **widened)["out"]
        hidden = hidden + compute(ModelPart.DOWN, number, **{"in": active})["out"]
    normed = compute(ModelPart.LAST_NORM, -1, **{"in": hidden})["out"]
    predicting = normed[len(tokens) - num_sampled - 1 : -1]
    logits = compute(ModelPart.LOGITS, -1, **{"in": predicting})["out"]
    log_probs = score_tokens(logits, tokens_T[-num_sampled:], temperature)
    of_last = errors.get(LayerPart(ModelPart.LOG_PROBS))
    return log_probs if of_last is None else log_probs + of_last["out"]
