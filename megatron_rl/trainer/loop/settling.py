"""The backends that a run falls back from: their trial on every rank, before models are built."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from megatron_rl.config.settings import Settings
from megatron_rl.errors import PlatformError
from megatron_rl.ops.qkv import trial
from megatron_rl.trainer.mcore.session import Session

T = TypeVar("T", bound=Settings)


def settle_qkv_backend(settings: T, session: Session, say: Callable[[str], None]) -> T:
    """Return settings with Megatron's operations if `auto` took the kernel and it fails on a rank; say so.

    Raise on every rank if the flag names the kernel.
    """
    model, one = settings.model, settings.architecture
    if model.qkv_backend == "torch":
        return settings
    is_chosen = settings.sources.get("model.qkv_backend", "").startswith("--qkv-backend auto")

    def find_fault() -> str | None:
        try:
            queries = one.num_attention_heads // one.num_query_groups
            trial.check_backend(
                model.qkv_backend, session.device, settings.transformer.params_dtype, queries, one.kv_channels
            )
        except PlatformError as error:
            if not is_chosen:
                raise
            return str(error)
        return None

    faults = [fault for fault in session.gather_or_raise_everywhere(find_fault) if fault is not None]
    if not faults:
        return settings
    say(f"--qkv-backend auto takes torch after a trial: {faults[0]}")
    return dataclasses.replace(settings, model=dataclasses.replace(model, qkv_backend="torch"))
