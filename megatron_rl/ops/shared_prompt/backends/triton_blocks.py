"""The number of rows that a program of the `triton` backend has at once, by the chip that it runs on.

These blocks have not been timed. Every kernel was compiled for each chip below: a program fits into its shared memory,
and in half precision a thread spills at most 64 bytes of registers.
"""

import functools
from typing import NamedTuple

import torch


class Blocks(NamedTuple):
    """The rows that a program has at once, at most a tile of the tables, and the options that it is compiled with."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


class KernelBlocks(NamedTuple):
    """The blocks of each kernel."""

    forward: Blocks
    query_gradients: Blocks
    key_gradients: Blocks


class Chip(NamedTuple):
    """The properties of a chip that its blocks depend on."""

    kind: str
    """`cuda` or `hip`."""
    generation: int
    """The first number of the compute capability; 0 for hip."""
    shared_memory: int
    """The bytes of shared memory that a program may have."""


HOPPER = Chip("cuda", 9, 227 * 1024)
_CDNA3 = Chip("hip", 0, 64 * 1024)

# Blocks by the largest head dimension that they serve. For compute capability 8.0 and 9.0.
_LARGE = {
    64: KernelBlocks(Blocks(128, 128, 8, 3), Blocks(128, 64, 8, 3), Blocks(64, 128, 8, 2)),
    128: KernelBlocks(Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 2), Blocks(32, 128, 8, 2)),
    256: KernelBlocks(Blocks(128, 32, 8, 2), Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 2)),
}
# Capability 10.0 keeps sums outside the registers, and spills where 9.0 does not.
_BLACKWELL = {
    64: _LARGE[64],
    128: KernelBlocks(Blocks(128, 64, 8, 3), Blocks(128, 32, 8, 2), Blocks(32, 128, 8, 1)),
    256: KernelBlocks(Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 2), Blocks(32, 32, 8, 2)),
}
# Capabilities 8.6, 8.9 and 12.0 have 99 KiB of shared memory.
_SMALL = {
    64: _LARGE[64],
    128: KernelBlocks(Blocks(128, 32, 8, 3), Blocks(64, 64, 8, 2), Blocks(32, 64, 8, 2)),
    256: KernelBlocks(Blocks(64, 32, 8, 2), Blocks(32, 32, 4, 2), Blocks(32, 32, 8, 2)),
}
# A wave has 64 threads. With 4 waves, a thread has twice the registers that it has with 8.
_HIP = {
    64: KernelBlocks(Blocks(128, 64, 8, 2), Blocks(128, 64, 4, 2), Blocks(32, 64, 4, 2)),
    128: KernelBlocks(Blocks(128, 64, 8, 2), Blocks(64, 32, 4, 2), Blocks(16, 64, 4, 2)),
    256: KernelBlocks(Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 2), Blocks(16, 32, 4, 2)),
}
# Tensor cores would round fp32. Without them, products of larger blocks compile to very long programs.
_FULL = dict.fromkeys(_LARGE, KernelBlocks(*[Blocks(16, 16, 4, 1)] * 3))
# The most shared memory that a program of the large blocks takes on 8.0.
_LARGE_BYTES = 104 * 1024


def choose_blocks(width: int, dtype: torch.dtype, chip: Chip) -> KernelBlocks:
    """Return the blocks for rows of a width."""
    table = _FULL if dtype == torch.float32 else _find_table(chip)
    return next(kernels for widest, kernels in table.items() if width <= widest)


@functools.cache
def find_chip(device: torch.device) -> Chip:
    """Describe the chip of a device. On the CPU, Triton's interpreter takes any blocks."""
    if device.type != "cuda":
        return HOPPER
    if torch.version.hip is not None:
        return _CDNA3
    properties = torch.cuda.get_device_properties(device)
    # Older versions of torch know only the smaller memory that a program has by default.
    most = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return Chip("cuda", properties.major, most)


def _find_table(chip: Chip) -> dict[int, KernelBlocks]:
    if chip.kind == "hip":
        return _HIP
    if chip.shared_memory < _LARGE_BYTES:
        return _SMALL
    return _BLACKWELL if chip.generation >= 10 else _LARGE
