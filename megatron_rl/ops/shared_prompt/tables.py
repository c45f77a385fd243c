"""The tables that an attention looks up for a layout: made on the host, copied to a device once, kept by the layout."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch

from megatron_rl.ops.shared_prompt.layout import Layout
from megatron_rl.ops.tensor_tree import map_tensors

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
