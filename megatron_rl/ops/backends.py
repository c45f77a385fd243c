"""The backends of an operation: the table that each operation has, and the choice among those that can run."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from megatron_rl.errors import UsageError
from megatron_rl.types import Architecture


@dataclasses.dataclass(frozen=True)
class Conditions:
    """The conditions that a backend must run under. None stands for a size that every backend supports."""

    device: str
    """The type of a torch.device, such as `cuda`."""
    dtype: torch.dtype
    window: int | None = None
    head_dim: int | None = None
    """The width of a head."""
    value_dim: int | None = None
    """The width of a value's head; None for the width of a query's and a key's."""
    has_sinks: bool = False
    hidden_size: int | None = None
    has_latents: bool = False
    """True: heads come from several products, by multi-latent attention."""

    @classmethod
    def of(cls, device: str, dtype: torch.dtype, architecture: Architecture) -> "Conditions":
        """Return the conditions of a model on this type of device."""
        one = architecture
        sizes = (one.sliding_window, one.kv_channels, one.value_channels, one.has_sinks, one.hidden_size)
        return cls(device, dtype, *sizes, one.latents is not None)

    @property
    def is_half(self) -> bool:
        """Whether flash kernels are written for the dtype."""
        return self.dtype in (torch.float16, torch.bfloat16)

    @property
    def has_other_values(self) -> bool:
        """Whether values have another width than queries and keys."""
        return self.value_dim is not None and self.value_dim != self.head_dim


Refuse = Callable[[Conditions], str | None]
"""Return why a backend cannot run under the conditions; None if it can."""


def refuse_nothing(conditions: Conditions) -> None:
    """Refuse nothing."""


class HasRefusal(Protocol):
    """The part of a backend that all operations have; each adds the functions that it needs."""

    @property
    def refusal(self) -> Refuse: ...


F = TypeVar("F")
B = TypeVar("B", bound=HasRefusal)


@dataclasses.dataclass(frozen=True)
class FunctionBackend(Generic[F]):
    """A backend that needs one function, or the functions of one module."""

    run: F
    refusal: Refuse = refuse_nothing


@dataclasses.dataclass(frozen=True)
class Choice:
    """A backend that can run, by its name, and notes on the choice of `auto`."""

    name: str
    notes: tuple[str, ...] = ()


class Backends(dict[str, B]):
    """The backends of an operation, by the names that its flag has for them."""

    def __init__(
        self,
        flag: str,
        backends: Mapping[str, B],
        orders: Mapping[str, Sequence[str]],
        elsewhere: Sequence[str],
        others: Mapping[str, B] | None = None,
    ):
        """Keep the order in which `auto` tries backends on each type of device; the last one must run everywhere.

        `others` are not among the flag's names: another flag asks for them.
        """
        super().__init__(backends)
        self.flag, self._orders, self._elsewhere, self._others = flag, orders, elsewhere, others or {}

    def find(self, name: str) -> B:
        """Return the backend with this name."""
        backend = self.get(name) or self._others.get(name)
        if backend is None:
            raise UsageError(f"{self.flag} {name} does not exist: write one of auto, {', '.join(self)}")
        return backend

    def list_order(self, device: str) -> Sequence[str]:
        """Return the backends that `auto` takes on this type of device, the fastest first."""
        return self._orders.get(device, self._elsewhere)

    def choose(self, name: str, conditions: Conditions, faster: Sequence[str] = ()) -> Choice:
        """Choose the named backend, or with `auto` the first that can run: of the faster ones, then of the order.

        Raise a UsageError if the named one cannot run.
        """
        order = dict.fromkeys((*faster, *self.list_order(conditions.device)))
        if name == "auto":
            return self._choose_first(order, conditions)
        refused = self.find(name).refusal(conditions)
        if refused is not None:
            instead = self._choose_first(order, conditions).name
            raise UsageError(f"{self.flag} {name} cannot run here ({refused}): write {instead}, or auto")
        return Choice(name)

    def _choose_first(self, order: Mapping[str, Any], conditions: Conditions) -> Choice:
        """Return the first backend that can run, with the reasons against the earlier ones."""
        reasons = ""
        for name in order:
            refused = self.find(name).refusal(conditions)
            if refused is None:
                return Choice(name, (f"{self.flag} auto takes {name}{reasons}",))
            reasons += f"; not {name}: {refused}"
        raise AssertionError(f"the last backend of {self.flag} must run everywhere")
