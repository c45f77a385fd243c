"""The backends that a run falls back from: their trial on every rank, before models are built."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from megatron_rl.config.settings import Settings
from megatron_rl.errors import PlatformError
from megatron_rl.ops.backends import Conditions
from megatron_rl.ops.operations import OPERATIONS
from megatron_rl.ops.shared_prompt.backends.triton_blocks import use_blocks
from megatron_rl.trainer.mcore.session import Session

T = TypeVar("T", bound=Settings)


def settle_backends(settings: T, session: Session, say: Callable[[str], None]) -> T:
    """Try all backends on the device; return settings with those that passed, and say which did not."""
    settings = settle_blocks(settings, session, say)
    for target in OPERATIONS:
        settings = settle_backend(target, settings, session, say)
    return settings


def settle_backend(target: str, settings: T, session: Session, say: Callable[[str], None]) -> T:
    """Return settings with the next backend of `auto`'s order if `auto` chose one that fails on a rank, and say so.

    `target` is a field of the settings. Raise on every rank if the flag names the backend.
    """
    backends = OPERATIONS[target]
    order = backends.list_order(session.device.type)
    return _settle(target, backends.flag, order, lambda one: try_backend(target, one, session), settings, session, say)


def settle_blocks(settings: T, session: Session, say: Callable[[str], None]) -> T:
    """Do the same for the blocks of attention, which kernels are launched with from now on.

    The chip's are tried with the backend, which `auto` can replace.
    """

    def try_measured(settings: Settings) -> None:
        use_blocks(settings.attention.blocks)
        if settings.attention.blocks != "chip":
            try_backend("attention.backend", settings, session)

    return _settle("attention.blocks", "--shared-prompt-blocks", ("chip",), try_measured, settings, session, say)


def try_backend(target: str, settings: Settings, session: Session) -> None:
    """Raise unless the device computes what the backend of the settings must."""
    device = session.device
    conditions = Conditions.of(device.type, settings.transformer.params_dtype, settings.architecture)
    OPERATIONS[target].check(_read(target, settings), conditions, device)


def _settle(
    target: str,
    flag: str,
    others: Sequence[str],
    try_choice: Callable[[Settings], None],
    settings: T,
    session: Session,
    say: Callable[[str], None],
) -> T:
    """Return settings with the first choice that passes its trial on every rank: the present one, then the others.

    If the flag names the choice, or none passes, raise on every rank. The order of others is the same on all ranks.
    """
    subject, field = target.split(".")
    present = _read(target, settings)
    is_chosen = settings.sources.get(target, "").startswith(f"{flag} auto")
    left = [other for other in others if other != present] if is_chosen else []
    faults: list[str] = []
    while fault := _find_fault(try_choice, settings, session, is_last=not left, earlier=faults):
        faults.append(fault)
        changes: dict[str, Any] = {subject: dataclasses.replace(getattr(settings, subject), **{field: left.pop(0)})}
        settings = dataclasses.replace(settings, **changes)
    if faults:
        say(f"{flag} auto takes {_read(target, settings)} after a trial: {'; '.join(faults)}")
    return settings


def _read(target: str, settings: Settings) -> str:
    subject, field = target.split(".")
    return getattr(getattr(settings, subject), field)


def _find_fault(
    try_choice: Callable[[Settings], None], settings: Settings, session: Session, is_last: bool, earlier: Sequence[str]
) -> str:
    """Return the first rank's fault; empty if there is none. Raise it on every rank if no choice is left."""

    def find_fault() -> str:
        try:
            try_choice(settings)
        # A kernel may also fail to compile.
        except Exception as error:
            if not is_last:
                return str(error) or type(error).__name__
            if not earlier:
                raise
            raise PlatformError(f"every choice fails its trial: {'; '.join((*earlier, str(error)))}") from error
        return ""

    return next(filter(None, session.gather_or_raise_everywhere(find_fault)), "")
