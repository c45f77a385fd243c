"""The backends that a run falls back from: their trial on every rank, before models are built."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from megatron_rl.config.settings import Settings
from megatron_rl.ops.elementwise import trial as elementwise_trial
from megatron_rl.ops.qkv import trial as qkv_trial
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

    return _settle("elementwise_backend", check, settings, session, say)


def settle_qkv_backend(settings: T, session: Session, say: Callable[[str], None]) -> T:
    """Do the same for the heads of queries, keys and values."""
    one = settings.architecture

    def check() -> None:
        queries = one.num_attention_heads // one.num_query_groups
        qkv_trial.check_backend(
            settings.model.qkv_backend, session.device, settings.transformer.params_dtype, queries, one.kv_channels
        )

    return _settle("qkv_backend", check, settings, session, say)


def _settle(field: str, check: Callable[[], None], settings: T, session: Session, say: Callable[[str], None]) -> T:
    if getattr(settings.model, field) == "torch":
        return settings
    flag = f"--{field.replace('_', '-')}"
    is_chosen = settings.sources.get(f"model.{field}", "").startswith(f"{flag} auto")

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
    say(f"{flag} auto takes torch after a trial: {faults[0]}")
    changes: dict[str, Any] = {field: "torch"}
    return dataclasses.replace(settings, model=dataclasses.replace(settings.model, **changes))
