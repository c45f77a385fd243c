"""The tables that an attention looks up for a layout: made on the host, copied to a device once, kept by the layout.

Tables are values that hold tensors: dataclasses, tuples, lists and mappings, in each other.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch

from megatron_rl.ops.shared_prompt.layout import Layout

T = TypeVar("T")


def find_tables(layout: Layout, device: torch.device, make: Callable[..., T], *arguments: Hashable) -> T:
    """Return `make(layout, *arguments)` with its tensors on the device.

    The host waits for the copies, unless `keep_tables` was called first.
    """
    return layout.once(_copy_tables, device, make, *arguments)


def list_tables(layout: Layout) -> dict[tuple[Any, ...], Any]:
    """Return the host's tables that the layout has kept."""
    return {key: tables for key, tables in layout.kept.items() if key[0] is not _copy_tables}


def keep_tables(layout: Layout, device: torch.device, copied: Mapping[tuple[Any, ...], Any]) -> None:
    """Keep tables of `list_tables` whose tensors were copied to the device, for `find_tables`."""
    for key, tables in copied.items():
        layout.keep(tables, _copy_tables, device, *key)


def _copy_tables(layout: Layout, device: torch.device, make: Callable[..., Any], *arguments: Hashable) -> Any:
    return map_tensors(layout.once(make, *arguments), lambda tensor: tensor.to(device))


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the value with each tensor replaced by the function's result.

    Tensors come in the order of fields. A part of which no tensor changes stays the same object. A field that
    `__init__` does not take is left as `__init__` makes it.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (list, tuple):
        parts = [map_tensors(part, function) for part in value]
        is_changed = any(new is not old for new, old in zip(parts, value, strict=True))
        return type(value)(parts) if is_changed else value
    if type(value) is dict:
        mapped = {key: map_tensors(part, function) for key, part in value.items()}
        return mapped if any(mapped[key] is not value[key] for key in value) else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {}
        for field in dataclasses.fields(value):
            old = getattr(value, field.name)
            if field.init and (new := map_tensors(old, function)) is not old:
                changed[field.name] = new
        return dataclasses.replace(value, **changed) if changed else value
    return value


def list_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a value, in the order of `map_tensors`."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found
