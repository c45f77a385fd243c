"""Compute the auxiliary losses of routers from their formulas, with transformers and torch.

Tests compare the trainer's results with these, so nothing of megatron_rl is used here.

Letters: T tokens of a micro-batch, B sequences of L tokens, R rows of these, X experts.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from tests import hf_models
from tests.grpo_twin import Group, Tensors
from tests.truth import everything_in

MicroBatch = list[tuple[list[int], list[list[int]]]]
"""Prompts, each with the responses that belong to this micro-batch."""


@dataclasses.dataclass(frozen=True)
class Auxiliary:
    """The auxiliary losses of an update, of each layer and micro-batch."""

    gradients: Tensors
    balancing: torch.Tensor
    z: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """The weights of the two losses."""

    balancing: float
    z: float

    @property
    def words(self) -> str:
        """The flags that set these weights."""
        return f"--moe-aux-loss-coeff {self.balancing} --moe-z-loss-coeff {self.z}"


def micro_batches(groups: Sequence[Group], size: int) -> Iterator[MicroBatch]:
    """Yield micro-batches of `size` responses: whole groups, or equal parts of one group."""
    per_group = len(groups[0].responses)
    if size >= per_group:
        for first in range(0, len(groups), size // per_group):
            yield [(group.prompt, group.responses) for group in groups[first : first + size // per_group]]
        return
    for group in groups:
        for first in range(0, per_group, size):
            yield [(group.prompt, group.responses[first : first + size])]


def auxiliary(
    folder: Path,
    batches: Sequence[MicroBatch],
    shares: Sequence[float],
    coefficients: Coefficients,
    is_shared: bool = True,
    multiple_of: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Auxiliary:
    """Return the mean over micro-batches by their shares, of the sum over layers of both losses by their coefficients.

    A prompt's tokens count once with all of its responses, or once with each of them; the tokens that fill a
    micro-batch up to a multiple count as a sequence of their own.
    """
    with everything_in(dtype):
        model = hf_models.load(folder, dtype)
        found: list[list[torch.Tensor]] = [[], []]
        for batch, share in zip(batches, shares, strict=True):
            layers = _router_logits(model, batch, is_shared, multiple_of)
            balancing = [_balancing(logits_TX, model.config.num_experts_per_tok) for logits_TX in layers]
            z = [_z(logits_TX) for logits_TX in layers]
            total = coefficients.balancing * sum(balancing) + coefficients.z * sum(z)
            (total * (share / sum(shares))).backward()
            found[0] += [one.detach() for one in balancing]
            found[1] += [one.detach() for one in z]
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    return Auxiliary(as_saved(gradients), *(torch.stack(of_layers) for of_layers in found))


def as_saved(tensors: Tensors) -> Tensors:
    """Return a model's tensors under the names of its checkpoint, which has each expert separately."""
    saved: Tensors = {}
    for name, tensor in tensors.items():
        before, found, projection = name.partition("mlp.experts.")
        if not found:
            saved[name] = tensor
            continue
        for number, of_expert in enumerate(tensor):
            parts = {"down_proj": of_expert}
            if projection == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), of_expert.chunk(2), strict=True))
            saved |= {f"{before}{found}{number}.{part}.weight": value for part, value in parts.items()}
    return saved


def _router_logits(model: torch.nn.Module, batch: MicroBatch, is_shared: bool, multiple_of: int) -> list[torch.Tensor]:
    """Return each layer's router logits [T, X] of all tokens that pass through it."""
    # Each sequence, and the first of its tokens that no earlier one has.
    sequences = [
        (prompt + response, len(prompt) if is_shared and number else 0)
        for prompt, responses in batch
        for number, response in enumerate(responses)
    ]
    num_tokens = sum(len(tokens) - first for tokens, first in sequences)
    if num_tokens % multiple_of:
        sequences.append(([0] * (-num_tokens % multiple_of), 0))
    # No token sees the padding after a shorter sequence.
    ids_BL = torch.nn.utils.rnn.pad_sequence([torch.tensor(tokens) for tokens, _ in sequences], batch_first=True)
    counts_BL = torch.zeros(ids_BL.shape, dtype=torch.bool)
    for row_L, (tokens, first) in zip(counts_BL, sequences, strict=True):
        row_L[first : len(tokens)] = True
    seen: list[torch.Tensor] = []
    gates = [layer.mlp.gate for layer in model.model.layers]
    hooks = [gate.register_forward_hook(lambda *found: seen.append(found[2][0])) for gate in gates]
    model.model(ids_BL)
    for hook in hooks:
        hook.remove()
    return [logits_RX[counts_BL.flatten()] for logits_RX in seen]


def _balancing(logits_TX: torch.Tensor, num_active: int) -> torch.Tensor:
    """Return the experts' number times the sum over experts of their part of the choices and their mean probability."""
    probabilities_TX = logits_TX.softmax(-1)
    num_experts = logits_TX.shape[1]
    chosen = probabilities_TX.topk(num_active).indices.flatten()
    part_X = torch.bincount(chosen, minlength=num_experts) / len(chosen)
    return num_experts * (part_X * probabilities_TX.mean(0)).sum()


def _z(logits_TX: torch.Tensor) -> torch.Tensor:
    return logits_TX.logsumexp(-1).square().mean()
