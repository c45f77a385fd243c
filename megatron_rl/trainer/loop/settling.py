"""The backends that a run falls back from: their trial on every rank, before models are built."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from megatron_rl.config.settings import Settings
from megatron_rl.errors import PlatformError
from megatron_rl.ops import elementwise, gated_delta, log_probs, qkv, shared_prompt
from megatron_rl.ops.backends import Backends, Conditions
from megatron_rl.ops.invariant.bit_equality import check_operations
from megatron_rl.ops.log_probs.invariant import list_widths
from megatron_rl.ops.shared_prompt.backends.triton_blocks import use_blocks
from megatron_rl.trainer.mcore.session import Session

T = TypeVar("T", bound=Settings)


def settle_backends(settings: T, session: Session, say: Callable[[str], None]) -> T:
    """Try all backends on the device; return settings with those that passed, and say which did not."""
    settings = settle_attention(settings, session, say)
    for target in TRIALS:
        settings = settle_backend(target, settings, session, say)
    return settings


def settle_backend(target: str, settings: T, session: Session, say: Callable[[str], None]) -> T:
    """Return settings with the next backend of `auto`'s order if `auto` chose one that fails on a rank, and say so.

    `target` is a field of the settings. Raise on every rank if the flag names the backend.
    """
    backends, try_backend = TRIALS[target]
    order = backends.list_order(session.device.type)
    return _settle(target, backends.flag, order, try_backend, settings, session, say)


def _try_linear_attention(settings: Settings, device: torch.device) -> None:
    linear, name = settings.architecture.linear, settings.model.linear_attention_backend
    if linear is not None:
        copies = linear.num_value_heads // linear.num_key_heads
        dtype = settings.transformer.params_dtype
        gated_delta.check_backend(name, device, dtype, copies, linear.key_head_dim, linear.value_head_dim)


def _try_output_layer(settings: Settings, device: torch.device) -> None:
    log_probs.check_backend(settings.model.output_layer_backend, device, settings.transformer.params_dtype)


def _try_elementwise(settings: Settings, device: torch.device) -> None:
    name = settings.model.elementwise_backend
    # With `torch` a model runs Megatron's own operations. The same below.
    if name != "torch":
        elementwise.check_backend(name, device, settings.transformer.params_dtype)


def _try_qkv(settings: Settings, device: torch.device) -> None:
    name, one = settings.model.qkv_backend, settings.architecture
    if name != "torch":
        queries = one.num_attention_heads // one.num_query_groups
        qkv.check_backend(name, device, settings.transformer.params_dtype, queries, one.kv_channels)


Try = Callable[[Settings, torch.device], None]
"""Raise unless the device computes what the backend of the settings must compute."""

TRIALS: Mapping[str, tuple[Backends[Any], Try]] = {
    "model.linear_attention_backend": (gated_delta.BACKENDS, _try_linear_attention),
    "model.output_layer_backend": (log_probs.BACKENDS, _try_output_layer),
    "model.elementwise_backend": (elementwise.BACKENDS, _try_elementwise),
    "model.qkv_backend": (qkv.BACKENDS, _try_qkv),
}


def try_invariance(settings: Settings) -> None:
    """Raise unless rows have the same bits in every batch here, with --batch-invariant on a CPU."""
    if not settings.rollout.is_batch_invariant:
        return
    one = settings.architecture
    hidden, heads = one.hidden_size, one.num_attention_heads * one.kv_channels
    columns = heads + 2 * one.num_query_groups * one.kv_channels
    outputs = (columns, 2 * one.ffn_hidden_size, *list_widths(one.vocab_size))
    shapes = [(heads, hidden), (one.ffn_hidden_size, hidden), *((hidden, output) for output in outputs)]
    queries = one.num_attention_heads // one.num_query_groups
    check_operations(shapes, queries, one.kv_channels, settings.transformer.params_dtype)


def settle_attention(settings: T, session: Session, say: Callable[[str], None]) -> T:
    """Do the same as `settle_backend` for the blocks and the backend of attention."""

    def try_measured_blocks(settings: Settings, device: torch.device) -> None:
        # The chip's own are tried with the backend, which `auto` can replace.
        if settings.attention.blocks != "chip":
            try_attention(settings, device)

    flag, order = shared_prompt.BACKENDS.flag, shared_prompt.BACKENDS.list_order(session.device.type)
    settings = _settle(
        "attention.blocks", "--shared-prompt-blocks", ("chip",), try_measured_blocks, settings, session, say
    )
    return _settle("attention.backend", flag, order, try_attention, settings, session, say)


def try_attention(settings: Settings, device: torch.device) -> None:
    """Raise unless the device computes attention; from now on kernels are launched with the blocks of the settings."""
    use_blocks(settings.attention.blocks)
    one, name, dtype = settings.architecture, settings.attention.backend, settings.transformer.params_dtype
    refused = shared_prompt.BACKENDS.find(name).refusal(Conditions.of(device.type, dtype, one))
    if refused is not None:
        raise PlatformError(f"{name} cannot run here: {refused}")
    sizes = one.num_attention_heads, one.num_query_groups, one.kv_channels
    for window in one.windows:
        shared_prompt.check_backend(name, device, dtype, *sizes, window, one.value_channels, one.has_sinks)


def _settle(
    target: str,
    flag: str,
    others: Sequence[str],
    try_choice: Try,
    settings: T,
    session: Session,
    say: Callable[[str], None],
) -> T:
    """Return settings with the first choice that passes its trial on every rank: the present one, then the others.

    If the flag names the choice, or none passes, raise on every rank. The order of others is the same on all ranks.
    """
    subject, field = target.split(".")
    present = getattr(getattr(settings, subject), field)
    is_chosen = settings.sources.get(target, "").startswith(f"{flag} auto")
    left = [other for other in others if other != present] if is_chosen else []
    faults: list[str] = []
    while fault := _find_fault(try_choice, settings, session, is_last=not left, earlier=faults):
        faults.append(fault)
        changes: dict[str, Any] = {subject: dataclasses.replace(getattr(settings, subject), **{field: left.pop(0)})}
        settings = dataclasses.replace(settings, **changes)
    if faults:
        say(f"{flag} auto takes {getattr(getattr(settings, subject), field)} after a trial: {'; '.join(faults)}")
    return settings


def _find_fault(try_choice: Try, settings: Settings, session: Session, is_last: bool, earlier: Sequence[str]) -> str:
    """Return the first rank's fault; empty if there is none. Raise it on every rank if no choice is left."""

    def find_fault() -> str:
        try:
            try_choice(settings, session.device)
        # A kernel may also fail to compile.
        except Exception as error:
            if not is_last:
                return str(error) or type(error).__name__
            if not earlier:
                raise
            raise PlatformError(f"every choice fails its trial: {'; '.join((*earlier, str(error)))}") from error
        return ""

    return next(filter(None, session.gather_or_raise_everywhere(find_fault)), "")
