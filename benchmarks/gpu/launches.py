"""Time a launch of a Triton kernel on the host, on tensors so small that the host is never ahead by much.

The step ledger weighs a launch with such a time (`benchmarks/ledger/costs.py`).
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.gpu.work import Work
from megatron_rl import platforms
from megatron_rl.ops import triton_support

NUM_ROUNDS = 7
# Fewer than a stream queues, so that the host never waits.
NUM_LAUNCHES, NUM_TINY_LAUNCHES = 100, 2


def measure(work: Work) -> None:
    """Add a row for a kernel with few arguments, and one for a kernel with many."""
    from megatron_rl.ops.elementwise import triton_kernels

    device = torch.device(work.device)
    one, other, found = (torch.ones(64, 16, dtype=torch.bfloat16, device=device) for _ in range(3))
    numbers, weight = (torch.ones(size, dtype=torch.float32, device=device) for size in (64 * 16, 16))
    few = triton_kernels.swiglu_kernel, (64, 1), (one, found, 8), {"COLUMNS": 1024, "num_warps": 2}
    many = (
        triton_kernels.add_norm_gradient_kernel, (8,), (one, other, one, weight, numbers, found, numbers, 16, 64, 8),
        {"WITH_SUM": True, "COLUMNS": 512, "num_warps": 1},
    )  # fmt: skip
    for kernel, grid, arguments, constants in (few, many):
        add_row(work, kernel, grid, arguments, constants, lambda: torch.add(one, other))


def add_row(
    work: Work,
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    constants: Mapping[str, Any],
    operator: Callable[[], object],
) -> None:
    """Add the row of a kernel with its arguments."""
    platform = platforms.select(work.device)

    def launch_through_triton() -> None:
        kernel[grid](*arguments, **constants)

    def launch_kept() -> None:
        triton_support.launch(kernel, grid, *arguments, **constants)

    platform.synchronize()
    begun = time.perf_counter()
    launch_through_triton()
    platform.synchronize()
    first = time.perf_counter() - begun
    acts = {"cold": launch_through_triton, "kept": launch_kept, "operator": operator}
    rounds: dict[str, list[float]] = {name: [] for name in acts}
    num_launches = NUM_TINY_LAUNCHES if work.is_tiny else NUM_LAUNCHES
    for act in acts.values():
        act()
    for _ in range(1 if work.is_tiny else NUM_ROUNDS):
        for name, act in acts.items():
            platform.synchronize()
            rounds[name].append(time_host(act, num_launches))
    figures = {name: 1e6 * statistics.median(seconds) for name, seconds in rounds.items()}
    note = "" if triton_support.is_kept(kernel) else "no launch is kept here"
    speedup = figures["cold"] / figures["kept"]
    work.add("launches", describe(kernel, arguments, constants), note, first=1e3 * first, speedup=speedup, **figures)


def time_host(act: Callable[[], object], count: int) -> float:
    """Return the seconds that the host takes for one of several acts, without waiting for the device."""
    begun = time.perf_counter()
    for _ in range(count):
        act()
    return (time.perf_counter() - begun) / count


def describe(kernel: Any, arguments: tuple[Any, ...], constants: Mapping[str, Any]) -> str:
    """Name the kernel, and the number of its arguments."""
    return f"{kernel.__name__}, {len(arguments)} arguments and {len(constants)} constants"
