"""The log-probs of sampled tokens on GPUs: by a kernel of ours in place of vLLM's two.

For each sampled token vLLM reads its row of logits three times: for the largest, for the sum of exponents, and for the
rank. Ours reads it once, and gives the same rank and, to rounding, the same log-prob. It is used only where the sampled
token's own log-prob is all that is asked for, as this package does; vLLM computes everything else, and everything on
other devices.

The kernel is put in place only if vLLM's function has the form that is expected here, and if the kernel passes a trial
on the device. Otherwise vLLM's stays, and the log says why.
"""

import functools
import importlib
import inspect
from types import ModuleType
from typing import Any

import torch

from megatron_rl.ops.sampled import score, try_kernel
from megatron_rl.sidecar.vllm.patches import NOT_APPLIED, name_parameters, once

OURS = "ours"
_UNKNOWN = f"{NOT_APPLIED}: this vLLM scores sampled tokens in another way"
_SAMPLER = "vllm.v1.worker.gpu.sample.sampler"
_FUNCTION = "compute_topk_scores"
# As in vLLM 0.32 and 0.33.
_PARAMETERS = (
    "logits", "num_logprobs", "sampled_token_ids", "cu_num_logits", "logprob_token_ids_state", "expanded_idx_mapping",
    "max_per_req_token_ids", "logits_mode",
)  # fmt: skip
_RESULTS = (
    "logprob_token_ids", "logprobs", "selected_token_ranks", "cu_num_generated_tokens",
    "cu_num_generated_tokens_tensor",
)  # fmt: skip


def use_own_scoring(choice: str, has_new_runner: bool, device: torch.device, dtype: torch.dtype) -> str:
    """Put our kernel in place of vLLM's if it is wanted and can be; return a report.

    `has_new_runner` says whether the worker has vLLM's second model runner; the first one scores in another way.
    """
    from vllm.platforms import current_platform

    if choice != OURS:
        return "not wanted"
    if not current_platform.is_cuda_alike():
        return "not needed: not a GPU"
    if not has_new_runner:
        return f"{NOT_APPLIED}: vLLM uses its first model runner"
    try:
        sampler = importlib.import_module(_SAMPLER)
    except ImportError:
        return _UNKNOWN
    return patch_sampler(sampler, device, dtype)


@once
def patch_sampler(sampler: ModuleType, device: torch.device, dtype: torch.dtype) -> str:
    """Patch vLLM's sampler for logits of this dtype on this device."""
    given = getattr(sampler, _FUNCTION, None)
    if not callable(given) or not _is_known(given):
        return _UNKNOWN
    for kind in dict.fromkeys((dtype, torch.float32)):
        if (fault := try_kernel(device, kind)) is not None:
            return f"{NOT_APPLIED}: for {str(kind).removeprefix('torch.')}, {fault}"
    setattr(sampler, _FUNCTION, _build_scoring(given))
    return "applied"


def _is_known(function: Any) -> bool:
    results = getattr(inspect.signature(function).return_annotation, "_fields", ())
    return name_parameters(function) == _PARAMETERS and results == _RESULTS


def _build_scoring(given: Any) -> Any:
    """Build a function that stands in for the given one."""
    signature = inspect.signature(given)
    results = signature.return_annotation

    @functools.wraps(given)
    def compute(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        asked = bound.arguments
        logits, sampled = asked["logits"], asked["sampled_token_ids"]
        is_sampled_alone = not (asked["num_logprobs"] or asked["max_per_req_token_ids"] or asked["logits_mode"])
        if not is_sampled_alone or logits.stride(-1) != 1:
            return given(*arguments, **named)
        log_probs, ranks = score(logits, sampled.contiguous())
        ends = asked["cu_num_logits"]
        is_on_device = isinstance(ends, torch.Tensor)
        return results(
            logprob_token_ids=sampled[:, None],
            logprobs=log_probs[:, None],
            selected_token_ranks=ranks,
            cu_num_generated_tokens=None if is_on_device else ends,
            cu_num_generated_tokens_tensor=ends if is_on_device else None,
        )

    return compute
