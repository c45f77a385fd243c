"""The choice among the backends of an operation: the one that a flag names, or the fastest that can run."""

import dataclasses
from collections.abc import Callable, Iterable

from megatron_rl.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Choice:
    """A backend that can run, by its name, and notes on the choice of `auto`."""

    name: str
    notes: tuple[str, ...] = ()


def choose_by_flag(flag: str, name: str, order: Iterable[str], refusal: Callable[[str], str | None]) -> Choice:
    """Choose the named backend, or with `auto` the first of the order that can run; the last one must be able to.

    `refusal` returns why a backend cannot run, or None. Raise a UsageError if the named one cannot.
    """
    if name == "auto":
        return _choose_first(flag, order, refusal)
    refused = refusal(name)
    if refused is not None:
        instead = _choose_first(flag, order, refusal).name
        raise UsageError(f"{flag} {name} cannot run here ({refused}): write {instead}, or auto")
    return Choice(name)


def _choose_first(flag: str, order: Iterable[str], refusal: Callable[[str], str | None]) -> Choice:
    """Return the first backend that can run, with the reasons against the earlier ones."""
    refusals: list[str] = []
    for name in order:
        refused = refusal(name)
        if refused is None:
            reason = "".join(f"; not {refused}" for refused in refusals)
            return Choice(name, (f"{flag} auto takes {name}{reason}",))
        refusals.append(f"{name}: {refused}")
    raise AssertionError(f"the last backend of {flag} must run everywhere")
