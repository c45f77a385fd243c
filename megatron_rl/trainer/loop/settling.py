"""The backends that a run falls back from: their trial on every rank, before models are built."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from megatron_rl.config.settings import Settings
from megatron_rl.ops.elementwise import trial as elementwise_trial
from megatron_rl.ops.qkv import trial as qkv_trial
from megatron_rl.ops.shared_prompt import trial as attention_trial
from megatron_rl.ops.shared_prompt.backends.triton_blocks import use_blocks
from megatron_rl.trainer.mcore.session import Session

T = TypeVar("T", bound=Settings)


def settle_elementwise_backend(settings: T, session: Session, say: Callable[[str], None]) -> T:
    """Return settings with Megatron's operations if `auto` took the kernels and they fail on a rank, and say so.

    Raise on every rank if the flag names the kernels. The same below.
    """

    def check() -> None:
        elementwise_trial.check_backend(
            settings.model.elementwise_backend, session.device, settings.transformer.params_dtype
        )

    return _settle("model.elementwise_backend", "--elementwise-backend", "torch", check, settings, session, say)


def settle_qkv_backend(settings: T, session: Session, say: Callable[[str], None]) -> T:
    """Do the same for the heads of queries, keys and values."""
    one = settings.architecture

    def check() -> None:
        queries = one.num_attention_heads // one.num_query_groups
        qkv_trial.check_backend(
            settings.model.qkv_backend, session.device, settings.transformer.params_dtype, queries, one.kv_channels
        )

    return _settle("model.qkv_backend", "--qkv-backend", "torch", check, settings, session, say)


def settle_attention(settings: T, session: Session, say: Callable[[str], None]) -> T:
    """Do the same for measured blocks, and for `cudnn`, which packs of other lengths leave for `triton` anyway.

    With a window `triton` falls back to `gather`. Any other backend that fails ends the run, in a later trial.
    """
    settings = _settle(
        "attention.blocks",
        "--shared-prompt-blocks",
        "chip",
        lambda: try_attention(settings, session.device),
        settings,
        session,
        say,
    )
    is_windowed = settings.architecture.sliding_window is not None
    instead = {"cudnn": "triton", "triton": "gather" if is_windowed else None}.get(settings.attention.backend)
    if instead is None:
        return settings
    return _settle(
        "attention.backend",
        "--shared-prompt-backend",
        instead,
        lambda: try_attention(settings, session.device),
        settings,
        session,
        say,
    )


def try_attention(settings: Settings, device: torch.device) -> None:
    """Raise unless the device computes attention; from now on kernels are launched with the blocks of the settings."""
    use_blocks(settings.attention.blocks)
    one = settings.architecture
    attention_trial.check_backend(
        settings.attention.backend,
        device,
        settings.transformer.params_dtype,
        one.num_attention_heads,
        one.num_query_groups,
        one.kv_channels,
        one.sliding_window,
        has_sinks=one.has_sinks,
    )


def _settle(
    target: str,
    flag: str,
    instead: str,
    check: Callable[[], None],
    settings: T,
    session: Session,
    say: Callable[[str], None],
) -> T:
    subject, field = target.split(".")
    config: Any = getattr(settings, subject)
    if getattr(config, field) == instead:
        return settings
    is_chosen = settings.sources.get(target, "").startswith(f"{flag} auto")

    def find_fault() -> str | None:
        try:
            check()
        # A kernel may also fail to compile.
        except Exception as error:
            if not is_chosen:
                raise
            return str(error)
        return None

    faults = [fault for fault in session.gather_or_raise_everywhere(find_fault) if fault is not None]
    if not faults:
        return settings
    say(f"{flag} auto takes {instead} after a trial: {faults[0]}")
    changes: dict[str, Any] = {subject: dataclasses.replace(config, **{field: instead})}
    return dataclasses.replace(settings, **changes)
