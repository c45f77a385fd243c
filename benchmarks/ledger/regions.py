"""Count calls together: operators that are one kernel on a device, and both passes of a part of a step."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benchmarks.ledger.counting import Call, Counter, Entry, Kind, active, count_bytes


def as_one_launch(
    function: Callable[..., Any],
    kinds: tuple[Kind, Kind] = (Kind.ELEMENTWISE, Kind.ELEMENTWISE),
    call: Call = Call.COMPILED,
) -> Callable[..., Any]:
    """Wrap a function of tensors that is one kernel, and whose gradients are one; `kinds` are those of both.

    A kernel reads each tensor that it is given, and writes each result. A gradient that is a result's own, as that of a
    sum, is not written.
    """
    name = getattr(function, "__name__", str(function))

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if (counter := active()) is None or counter.is_suspended:
            return function(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        return _OneLaunch.apply(
            _Region(function, name, kinds, call, leaves, spec, places), *(leaves[i] for i in places)
        )

    return wrapped


@dataclasses.dataclass(frozen=True)
class _Region:
    """A function that is one kernel, and the arguments of a call."""

    function: Callable[..., Any]
    name: str
    kinds: tuple[Kind, Kind]
    call: Call
    leaves: list[Any]
    spec: Any
    places: list[int]

    def run(self, tensors: list[torch.Tensor]) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)

    def enter(self, counter: Counter, is_backward: bool, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        """Enter the launch of a pass; if it has nothing to write, only the call."""
        name = f"{self.name}, backward" if is_backward else self.name
        num_bytes = sum(map(count_bytes, (*read, *written))) if written else 0
        width = max((tensor.shape[-1] for tensor in read if tensor.dim()), default=0)
        counter.add(
            Entry(name, self.kinds[is_backward], "", int(bool(written)), num_bytes, width=width, call=self.call)
        )


def _require_counter() -> Counter:
    counter = active()
    assert counter is not None, "a pass that a counter saw begin ends without one"
    return counter


class _OneLaunch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: _Region, *tensors: torch.Tensor) -> torch.Tensor | None:
        counter = _require_counter()
        with counter.suspended():
            ctx.inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
            with torch.enable_grad():
                ctx.result = region.run(ctx.inputs)
        ctx.region = region
        if ctx.result is None:
            # A function that changed nothing: the host has called it.
            region.enter(counter, False, list(tensors), [])
            return None
        with counter.suspended():
            result: torch.Tensor = ctx.result.detach()
        region.enter(counter, False, list(tensors), [result])
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        counter = _require_counter()
        wanted = [tensor for tensor in ctx.inputs if tensor.requires_grad]
        with counter.suspended():
            found = iter(torch.autograd.grad(ctx.result, wanted, grad))
        grads = [next(found) if tensor.requires_grad else None for tensor in ctx.inputs]
        written = [one for one in grads if one is not None and not _is_same_memory(one, grad)]
        ctx.region.enter(counter, True, [grad, *ctx.inputs], written)
        return None, *grads


def as_part(
    function: Callable[..., torch.Tensor], part: str, needed: Callable[..., tuple[Entry, Entry]] | None = None
) -> Callable[..., torch.Tensor]:
    """Wrap a function that returns a tensor: what it calls, and what its gradient calls, belongs to a part of the step.

    `needed` returns entries of work for both passes, from the function's arguments.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        if (counter := active()) is None:
            return function(*args, **kwargs)
        entries = needed(*args, **kwargs) if needed else (None, None)
        places = [place for place, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        border = _Border(counter, part, counter.part, entries)
        begun = iter(_Begin.apply(border, *(args[place] for place in places)))
        found = function(*(next(begun) if place in places else arg for place, arg in enumerate(args)), **kwargs)
        ended: torch.Tensor = _End.apply(border, found)
        return ended

    return wrapped


@dataclasses.dataclass(frozen=True)
class _Border:
    """The border of a part, which both passes cross twice."""

    counter: Counter
    part: str
    outside: str
    needed: tuple[Entry | None, Entry | None]

    def enter(self, is_backward: bool) -> None:
        self.counter.part = self.part
        if entry := self.needed[is_backward]:
            self.counter.add(entry)

    def leave(self) -> None:
        self.counter.part = self.outside


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, border: _Border, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.border = border
        border.enter(is_backward=False)
        with border.counter.suspended():
            return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        ctx.border.leave()
        return None, *grads


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, border: _Border, result: torch.Tensor) -> torch.Tensor:
        ctx.border = border
        border.leave()
        with border.counter.suspended():
            return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        ctx.border.enter(is_backward=True)
        return None, grad


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata
