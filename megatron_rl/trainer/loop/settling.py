"""The backends that a run falls back from: their trial on every rank, before models are built."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from megatron_rl.config.settings import Settings
from megatron_rl.errors import PlatformError
from megatron_rl.ops.elementwise import trial as elementwise_trial
from megatron_rl.ops.gated_delta import trial as linear_trial
from megatron_rl.ops.invariant.trial import check_operations
from megatron_rl.ops.log_probs import trial as output_layer_trial
from megatron_rl.ops.log_probs.invariant import list_widths
from megatron_rl.ops.qkv import trial as qkv_trial
from megatron_rl.ops.shared_prompt import Conditions, find_backend, list_order
from megatron_rl.ops.shared_prompt import trial as attention_trial
from megatron_rl.ops.shared_prompt.backends.triton_blocks import use_blocks
from megatron_rl.trainer.mcore.session import Session

T = TypeVar("T", bound=Settings)


def settle_backends(settings: T, session: Session, say: Callable[[str], None]) -> T:
    """Try all backends on the device; return settings with those that passed, and say which did not."""
    for settle in (
        settle_attention, settle_linear_attention, settle_output_layer, settle_elementwise_backend, settle_qkv_backend,
    ):  # fmt: skip
        settings = settle(settings, session, say)
    return settings


def settle_elementwise_backend(settings: T, session: Session, say: Callable[[str], None]) -> T:
    """Return settings with Megatron's operations if `auto` took the kernels and they fail on a rank, and say so.

    Raise on every rank if the flag names the kernels. The same below.
    """

    def check(settings: T) -> None:
        name = settings.model.elementwise_backend
        # These are Megatron's own operations. The same below.
        if name != "torch":
            elementwise_trial.check_backend(name, session.device, settings.transformer.params_dtype)

    return _settle("model.elementwise_backend", "--elementwise-backend", ("torch",), check, settings, session, say)


def settle_qkv_backend(settings: T, session: Session, say: Callable[[str], None]) -> T:
    """Do the same for the heads of queries, keys and values."""

    def check(settings: T) -> None:
        name, one = settings.model.qkv_backend, settings.architecture
        if name != "torch":
            queries = one.num_attention_heads // one.num_query_groups
            qkv_trial.check_backend(name, session.device, settings.transformer.params_dtype, queries, one.kv_channels)

    return _settle("model.qkv_backend", "--qkv-backend", ("torch",), check, settings, session, say)


def settle_output_layer(settings: T, session: Session, say: Callable[[str], None]) -> T:
    """Do the same for the output layer, whose operations of torch are tried too."""

    def check(settings: T) -> None:
        output_layer_trial.check_backend(
            settings.model.output_layer_backend, session.device, settings.transformer.params_dtype
        )

    return _settle("model.output_layer_backend", "--output-layer-backend", ("torch",), check, settings, session, say)


def settle_linear_attention(settings: T, session: Session, say: Callable[[str], None]) -> T:
    """Do the same for the gated delta rule of linear layers."""
    if settings.architecture.linear is None:
        return settings
    return _settle(
        "model.linear_attention_backend",
        "--linear-attention-backend",
        ("torch",),
        lambda settings: try_linear_attention(settings, session.device),
        settings,
        session,
        say,
    )


def try_linear_attention(settings: Settings, device: torch.device) -> None:
    """Raise unless the device computes the gated delta rule of linear layers, if the model has any."""
    linear = settings.architecture.linear
    if linear is None:
        return
    linear_trial.check_backend(
        settings.model.linear_attention_backend,
        device,
        settings.transformer.params_dtype,
        linear.num_value_heads // linear.num_key_heads,
        linear.key_head_dim,
        linear.value_head_dim,
    )


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
    """Do the same for the blocks and the backend of attention: `auto` takes the next backend that passes."""
    settings = _settle(
        "attention.blocks", "--shared-prompt-blocks", ("chip",), _try_measured_blocks(session), settings, session, say
    )
    return _settle(
        "attention.backend",
        "--shared-prompt-backend",
        list_order(session.device.type),
        lambda settings: try_attention(settings, session.device),
        settings,
        session,
        say,
    )


def _try_measured_blocks(session: Session) -> Callable[[Settings], None]:
    """Return the trial of blocks; those of the chip are tried with the backend, which `auto` can replace."""

    def check(settings: Settings) -> None:
        if settings.attention.blocks != "chip":
            try_attention(settings, session.device)

    return check


def try_attention(settings: Settings, device: torch.device) -> None:
    """Raise unless the device computes attention; from now on kernels are launched with the blocks of the settings."""
    use_blocks(settings.attention.blocks)
    one, dtype = settings.architecture, settings.transformer.params_dtype
    name = settings.attention.backend
    conditions = Conditions(device.type, dtype, one.sliding_window, one.kv_channels, one.value_channels, one.has_sinks)
    refused = find_backend(name).refusal(conditions)
    if refused is not None:
        raise PlatformError(f"{name} cannot run here: {refused}")
    for window in one.windows:
        attention_trial.check_backend(
            name,
            device,
            dtype,
            one.num_attention_heads,
            one.num_query_groups,
            one.kv_channels,
            window,
            one.value_channels,
            one.has_sinks,
        )


def _settle(
    target: str,
    flag: str,
    others: Sequence[str],
    check: Callable[[T], None],
    settings: T,
    session: Session,
    say: Callable[[str], None],
) -> T:
    """Return settings with the first choice that passes the check on every rank: the present one, then the others.

    If the flag names the choice, or none passes, raise on every rank. The order of others is the same on all ranks.
    """
    subject, field = target.split(".")
    present = getattr(getattr(settings, subject), field)
    is_chosen = settings.sources.get(target, "").startswith(f"{flag} auto")
    left = [other for other in others if other != present] if is_chosen else []
    faults: list[str] = []
    while fault := _find_fault(check, settings, session, is_last=not left, earlier=faults):
        faults.append(fault)
        changes: dict[str, Any] = {subject: dataclasses.replace(getattr(settings, subject), **{field: left.pop(0)})}
        settings = dataclasses.replace(settings, **changes)
    if faults:
        say(f"{flag} auto takes {getattr(getattr(settings, subject), field)} after a trial: {'; '.join(faults)}")
    return settings


def _find_fault(
    check: Callable[[T], None], settings: T, session: Session, is_last: bool, earlier: Sequence[str]
) -> str:
    """Return the first rank's fault; empty if there is none. Raise it on every rank if no choice is left."""

    def find_fault() -> str:
        try:
            check(settings)
        # A kernel may also fail to compile.
        except Exception as error:
            if not is_last:
                return str(error) or type(error).__name__
            if not earlier:
                raise
            raise PlatformError(f"every choice fails its trial: {'; '.join((*earlier, str(error)))}") from error
        return ""

    return next(filter(None, session.gather_or_raise_everywhere(find_fault)), "")
