"""The accelerators of this host for engines: those that are visible here and that no rank computes on.

Devices are numbered among the visible ones, as torch numbers them: with CUDA_VISIBLE_DEVICES=4,5 they are 0 and 1.
"""

import glob
import os
from collections.abc import Iterator, Mapping
from typing import Literal

VARIABLES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
_FILES = {"cuda": "/dev/nvidia[0-9]*", "npu": "/dev/davinci[0-9]*"}

Kind = Literal["cuda", "npu"]


def list_visible_devices(kind: Kind, environment: Mapping[str, str] = os.environ) -> list[str]:
    """List the names of the visible devices, as the variable of this kind has them."""
    given = environment.get(VARIABLES[kind])
    if given is None:
        return [str(number) for number in range(len(list_files(kind)))]
    return list(_names(given))


def list_files(kind: Kind) -> list[str]:
    """List the kernel's files of the devices on this host."""
    return glob.glob(_FILES[kind])


def _names(text: str) -> Iterator[str]:
    """Yield the names before the first one that is not a device's: CUDA ignores the rest."""
    for name in text.split(","):
        name = name.strip()
        if not name or name.startswith("-"):
            return
        yield name


def pick_after_ranks(kind: Kind, num_ranks: int, num_wanted: int) -> list[int] | None:
    """Pick devices for engines after the devices of `num_ranks` ranks; return None if too few are left."""
    end = num_ranks + num_wanted
    return list(range(num_ranks, end)) if num_wanted > 0 and end <= len(list_visible_devices(kind)) else None


def name_devices(kind: Kind, numbers: tuple[int, ...]) -> str:
    """Return the value of the variable with which a process sees these devices alone."""
    visible = list_visible_devices(kind)
    # If none is known to be visible, the numbers are those of the host.
    return ",".join(visible[number] if visible else str(number) for number in numbers)
