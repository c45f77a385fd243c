"""The backends of an operation: one table with their names, devices, refusals, order and trial."""

import dataclasses
import functools
import importlib
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch

from megatron_rl.errors import PlatformError, UsageError
from megatron_rl.ops import trials
from megatron_rl.types import Architecture, LinearAttention


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
    queries: int = 1
    """The query heads that share a head of keys and values."""
    linear: LinearAttention | None = None
    """The linear layers; None if there are none."""

    @classmethod
    def of(cls, device: str, dtype: torch.dtype, architecture: Architecture) -> "Conditions":
        """Return the conditions of a model on this type of device."""
        return cls(
            device,
            dtype,
            architecture.sliding_window,
            architecture.kv_channels,
            architecture.value_channels,
            architecture.has_sinks,
            architecture.hidden_size,
            architecture.latents is not None,
            architecture.num_attention_heads // architecture.num_query_groups,
            architecture.linear,
        )

    @property
    def is_half(self) -> bool:
        """Whether flash kernels are written for the dtype."""
        return self.dtype in (torch.float16, torch.bfloat16)

    @property
    def has_other_values(self) -> bool:
        """Whether values have another width than queries and keys."""
        return self.value_dim is not None and self.value_dim != self.head_dim


def refuse_nothing(conditions: Conditions) -> None:
    """Refuse nothing."""


class HasRefusal(Protocol):
    """The function that the modules of all backends have; each operation adds those that it needs."""

    def refusal(self, conditions: Conditions, /) -> str | None:
        """Return why the backend cannot run under the conditions; None if it can."""


B = TypeVar("B", bound=HasRefusal)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A backend that can run, by its name, and notes on the choice of `auto`."""

    name: str
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Example:
    """A small computation that a backend is tried by."""

    work: str
    """The words after "does not compute"."""
    results: Sequence[str]
    """The names of the results and gradients."""
    compute: Callable[[str, torch.device, torch.dtype], Sequence[torch.Tensor]]
    """Return the results of the backend with this name."""
    sizes: str = ""
    dtype: torch.dtype | None = None
    """The precision; None for that of the conditions."""
    by_row: bool = False
    """True: errors are parts of their row's largest number (`trials.compare`)."""


class Backends(UserDict[str, B]):
    """The backends of an operation, by the names that its flag has for them.

    A backend is a module. The table has a module that most runs choose, and the path of any other one, which is
    imported when it is asked for.
    """

    def __init__(
        self,
        flag: str,
        backends: Mapping[str, B | str],
        orders: Mapping[str, Sequence[str]],
        elsewhere: Sequence[str],
        definition: str,
        list_examples: Callable[[Conditions], Iterable[Example]],
        others: Mapping[str, B | str] | None = None,
        untried: Collection[str] = (),
        is_used: Callable[[Conditions], bool] = lambda conditions: True,
    ):
        """Keep the order in which `auto` tries backends on each type of device; the last one must run everywhere.

        The trial compares a backend with the definition, by examples for some conditions. `untried` are backends with
        which a model runs Megatron's own operations. `others` are not among the flag's names: another flag asks for
        them, or tests do. `is_used` says whether a model has the operation.
        """
        super().__init__(cast(Mapping[str, B], backends))
        self.flag, self._orders, self._elsewhere, self._others = flag, orders, elsewhere, dict(others or {})
        self._definition, self._list_examples, self._untried = definition, list_examples, untried
        self.is_used = is_used

    def __getitem__(self, name: str) -> B:
        return self._load(self.data, name)

    def _load(self, table: MutableMapping[str, Any], name: str) -> B:
        """Return a backend of a table, which keeps a module once it is imported."""
        if isinstance(table[name], str):
            table[name] = importlib.import_module(table[name])
        backend: B = table[name]
        return backend

    def find(self, name: str) -> B:
        if name in self._others:
            return self._load(self._others, name)
        if name not in self:
            raise UsageError(f"{self.flag} {name} does not exist: write one of auto, {', '.join(self)}")
        return self[name]

    def list_order(self, device: str) -> Sequence[str]:
        """Return the backends that `auto` tries on this type of device, the fastest first."""
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

    def check(self, name: str, conditions: Conditions, device: torch.device | None = None) -> None:
        """Raise a PlatformError if the backend cannot run, or does not compute its examples, on this device."""
        if not self.is_used(conditions) or name in self._untried:
            return
        refused = self.find(name).refusal(conditions)
        if refused is not None:
            raise PlatformError(f"{name} cannot run here: {refused}")

        def advise() -> str:
            others = [other for other in self if other != name and self[other].refusal(conditions) is None]
            return f"{'one of ' if len(others) > 1 else ''}{', '.join(others)} instead" if others else ""

        for example in self._list_examples(conditions):
            trials.check(
                f"{self.flag} {name} does not compute {example.work}",
                example.results,
                functools.partial(example.compute, name),
                functools.partial(example.compute, self._definition),
                device or torch.device(conditions.device),
                example.dtype or conditions.dtype,
                advise,
                example.sizes,
                example.by_row,
            )
