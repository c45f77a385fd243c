"""Attention in which the responses of a group share one copy of their prompt."""

import dataclasses

import torch

from megatron_rl.errors import UsageError
from megatron_rl.ops.shared_prompt.backends import (
    Backend,
    Conditions,
    flash_attention,
    flex,
    gather,
    merge,
    naive,
    triton_fused,
)
from megatron_rl.ops.shared_prompt.estimate import GroupShape, estimate_gain
from megatron_rl.ops.shared_prompt.layout import Layout

__all__ = [
    "BACKENDS",
    "Choice",
    "Conditions",
    "GroupShape",
    "choose_backend",
    "find_backend",
    "shared_prompt_attention",
]

# Without a better reason `auto` takes the first that can run; they are ordered by the times in docs/attention.md.
BACKENDS: dict[str, Backend] = {
    "merge": Backend(merge.attention, merge.prepare, merge.refusal),
    "gather": Backend(gather.attention, gather.prepare, gather.refusal),
    "triton": Backend(triton_fused.attention, triton_fused.prepare, triton_fused.refusal),
    "flash": Backend(flash_attention.attention, flash_attention.prepare, flash_attention.refusal),
    "flex": Backend(flex.attention, flex.prepare, flex.refusal),
    "naive": Backend(naive.attention, naive.prepare, lambda conditions: None),
}
# How many times as fast as `merge` an estimate must have `triton`, whose kernels no GPU has timed.
_GAIN = 1.5


@dataclasses.dataclass(frozen=True)
class Choice:
    """The name of a backend that can run, and notes on how `auto` chose it."""

    name: str
    notes: tuple[str, ...] = ()


def find_backend(name: str) -> Backend:
    """Return the backend of that name."""
    if name not in BACKENDS:
        raise UsageError(f"--shared-prompt-backend {name} does not exist: write one of auto, {', '.join(BACKENDS)}")
    return BACKENDS[name]


def choose_backend(name: str, conditions: Conditions, shape: GroupShape | None = None) -> Choice:
    """Choose the backend that was asked for, or with `auto` the best for a shape; raise UsageError if it cannot run."""
    if name == "auto":
        return _take_better(_first_that_can_run(conditions), conditions, shape)
    refusal = find_backend(name).refusal(conditions)
    if refusal is not None:
        instead = _first_that_can_run(conditions).name
        raise UsageError(f"--shared-prompt-backend {name} cannot run here ({refusal}): write {instead}, or auto")
    return Choice(name)


def shared_prompt_attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    layout: Layout,
    scale: float,
    window: int | None = None,
    backend_name: str = "naive",
) -> torch.Tensor:
    """Compute attention over one packed buffer: T tokens, H query heads, G key-value heads, D head dimension."""
    if q_THD.shape[0] != layout.num_tokens:
        raise ValueError(f"{q_THD.shape[0]} rows must be as many as the layout's {layout.num_tokens} tokens")
    return find_backend(backend_name).attention(q_THD, k_TGD, v_TGD, layout, scale, window)


def _take_better(first: Choice, conditions: Conditions, shape: GroupShape | None) -> Choice:
    """Take `triton` on CUDA where it is estimated to be much faster than `merge`."""
    if first.name != "merge" or conditions.device != "cuda" or shape is None:
        return first
    gain = estimate_gain(shape)
    is_better = gain >= _GAIN and shape.head_dim <= triton_fused.WIDEST
    if is_better and BACKENDS["triton"].refusal(conditions) is None:
        of = f"{shape.num_responses} responses of {shape.response} tokens to a prompt of {shape.prompt}"
        return Choice(
            "triton",
            (
                f"--shared-prompt-backend auto takes triton: for {of} it is estimated, and not measured, to be "
                f"{gain:.1f} times as fast as merge",
            ),
        )
    return first


def _first_that_can_run(conditions: Conditions) -> Choice:
    refusals: list[str] = []
    for name, candidate in BACKENDS.items():
        refusal = candidate.refusal(conditions)
        if refusal is None:
            reason = "".join(f"; not {refused}" for refused in refusals)
            return Choice(name, (f"--shared-prompt-backend auto takes {name}{reason}",))
        refusals.append(f"{name}: {refusal}")
    raise AssertionError("the naive backend runs everywhere")
