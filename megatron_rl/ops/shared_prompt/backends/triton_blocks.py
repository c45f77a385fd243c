"""The number of rows that a program of the `triton` backend has at once, by the chip that it runs on.

These blocks have not been timed beside others. Every kernel was compiled for each chip below: a program fits into its
shared memory, and in half precision a thread spills at most 64 bytes of registers. A process may use others in half
precision, whose names are as in `128x64x8x3,128x64x8x2,32x128x8x2`: the numbers of each kernel's Blocks.
"""

import functools
import re
from typing import NamedTuple

import torch

from megatron_rl.errors import UsageError
from megatron_rl.ops.shared_prompt.backends.triton_tables import TILE

BY_CHIP = "chip"
"""The name of the blocks that follow from the chip."""
FLAG = "--shared-prompt-blocks"
NARROWEST_BLOCK, MOST_WARPS, MOST_STAGES = 16, 16, 8


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


_USED: dict[str, KernelBlocks] = {}


def use_blocks(name: str) -> None:
    """Launch kernels with blocks of this name from now on, those of all widths in half precision."""
    _USED.clear()
    if name != BY_CHIP:
        _USED[name] = read_blocks(name)


def name_blocks(blocks: KernelBlocks) -> str:
    """Return the name that `read_blocks` reads."""
    return ",".join("x".join(map(str, of_kernel)) for of_kernel in blocks)


def read_blocks(name: str) -> KernelBlocks:
    """Return the blocks of a name; raise a UsageError if no kernel can have them."""
    kernels = [Blocks(*map(int, re.findall(r"\d+", words))) for words in name.split(",") if _is_one(words)]
    if len(kernels) != len(KernelBlocks._fields) or name_blocks(KernelBlocks(*kernels)) != name:
        raise UsageError(
            f"{FLAG} {name} must be {BY_CHIP}, or queries x keys x warps x stages of three kernels, as "
            "128x64x8x3,128x64x8x2,32x128x8x2"
        )
    for kernel, blocks in zip(KernelBlocks._fields, kernels, strict=True):
        rows_fit = all(NARROWEST_BLOCK <= rows <= TILE and _is_power(rows) for rows in blocks[:2])
        if not (rows_fit and _is_power(blocks.num_warps) and blocks.num_warps <= MOST_WARPS):
            raise UsageError(
                f"{FLAG} {name}: rows of {kernel} must be a power of two from {NARROWEST_BLOCK} to {TILE}, and warps "
                f"a power of two up to {MOST_WARPS}"
            )
        if not 1 <= blocks.num_stages <= MOST_STAGES:
            raise UsageError(f"{FLAG} {name}: stages of {kernel} must be between 1 and {MOST_STAGES}")
    return KernelBlocks(*kernels)


def _is_one(words: str) -> bool:
    return re.fullmatch(r"\d+x\d+x\d+x\d+", words) is not None


def _is_power(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def choose_blocks(width: int, dtype: torch.dtype, chip: Chip) -> KernelBlocks:
    """Return the blocks for rows of a width, those in use if there are any."""
    if _USED and dtype != torch.float32:
        return next(iter(_USED.values()))
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
