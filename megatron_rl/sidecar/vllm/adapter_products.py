"""The products of adapters on CPUs, if all tokens of a step name the same ones.

vLLM 0.32 expects each token to name others: it copies both factors once for each token, and multiplies each token with
its own copy. An engine of ours holds the adapters of one version, so two plain products of matrices give the same. A
step whose tokens name several adapters, or none, is left to vLLM.

Letters: T tokens, I inputs, K the slot's rank, O outputs.
"""

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from megatron_rl.sidecar.vllm.patches import NOT_APPLIED

_MARK = "megatron_rl_products_patch"
_SLOT = "megatron_rl_slot_of_step"
# As in vLLM 0.32.
_ADD = ("self", "y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "output_slices", "buffer", "kwargs")
_UPDATE = ("self", "mapping", "lora_index_to_id", "max_loras", "vocab_size", "kwargs")


def patch_products_of_adapters(lora: Any) -> str:
    """Have vLLM compute the products as this module says, given its settings of adapters; return a report."""
    if lora is None:
        return "not needed: no adapters"
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return "not needed: not a CPU"
    return patch_wrapper(importlib.import_module("vllm.lora.punica_wrapper.punica_cpu").PunicaWrapperCPU)


def patch_wrapper(wrapper: Any) -> str:
    """Patch vLLM's class that computes the products; return a report of the patch."""
    if getattr(wrapper, _MARK, False):
        return "applied before"
    add, update = wrapper.add_lora_linear, wrapper.update_metadata
    if [tuple(inspect.signature(function).parameters) for function in (add, update)] != [_ADD, _UPDATE]:
        return f"{NOT_APPLIED}: this vLLM computes adapters in another way"
    wrapper.add_lora_linear, wrapper.update_metadata = _adding_plainly(add), _noting_slot(update)
    setattr(wrapper, _MARK, True)
    return "applied"


def add_products(
    y: torch.Tensor,
    x: torch.Tensor,
    a_factors: Sequence[torch.Tensor],
    b_factors: Sequence[torch.Tensor],
    scale: float,
    widths: Sequence[int],
) -> None:
    """Add to columns of `y`, of these widths, the products of `x` with A (K, I) and B (O, K) of each module.

    As in vLLM, the first product is in float32 and the second in the dtype of `y`.
    """
    x_TI, y_TO = x.reshape(-1, x.shape[-1]).float(), y.view(-1, y.shape[-1])
    for part_TO, a_KI, b_OK in zip(y_TO.split(list(widths), 1), a_factors, b_factors, strict=True):
        inner_TK = x_TI @ a_KI.float().T
        part_TO.addmm_(inner_TK.to(y.dtype), b_OK.to(y.dtype).T, alpha=scale)


def _noting_slot(update: Any) -> Any:
    def update_metadata(self: Any, *args: Any, **kwargs: Any) -> None:
        update(self, *args, **kwargs)
        slots = set(self.token_lora_indices.tolist())
        # A token without adapters has the slot -1.
        setattr(self, _SLOT, slots.pop() if len(slots) == 1 and min(slots) >= 0 else None)

    return update_metadata


def _adding_plainly(add: Any) -> Any:
    def add_lora_linear(
        self: Any, y: Any, x: Any, lora_a_stacked: Any, lora_b_stacked: Any, *rest: Any, **kwargs: Any
    ) -> Any:
        slot = getattr(self, _SLOT, None)
        if slot is None or kwargs:
            return add(self, y, x, lora_a_stacked, lora_b_stacked, *rest, **kwargs)
        a_factors, b_factors = ([stack[slot, 0] for stack in stacks] for stacks in (lora_a_stacked, lora_b_stacked))
        return add_products(y, x, a_factors, b_factors, *rest)

    return add_lora_linear
