"""Try blocks of the `triton` backend beside those that follow from the chip, one kernel at a time."""

import functools
from collections.abc import Callable, Mapping

import torch

from benchmarks import gpu_times
from benchmarks.gpu_times import Shape, Times, Way
from megatron_rl.ops.shared_prompt.backends.triton_blocks import (
    BY_CHIP,
    Blocks,
    KernelBlocks,
    choose_blocks,
    find_chip,
    name_blocks,
    use_blocks,
)
from megatron_rl.ops.shared_prompt.backends.triton_fused import compute_width

# Seconds that a choice of blocks may take of a shape, once its kernels are compiled.
SECONDS_OF_A_CHOICE = 0.2
# Blocks that are faster by less than this share are not taken.
LEAST_GAIN = 0.02
# What is tried for a kernel besides the chip's blocks. What does not fit a chip does not run there.
CANDIDATES: Mapping[str, tuple[Blocks, ...]] = {
    "forward": (Blocks(128, 128, 8, 2), Blocks(128, 64, 4, 3), Blocks(64, 64, 4, 3), Blocks(64, 128, 4, 2)),
    "query_gradients": (Blocks(128, 32, 8, 3), Blocks(64, 64, 4, 3), Blocks(64, 128, 8, 2), Blocks(64, 64, 4, 2)),
    "key_gradients": (Blocks(64, 128, 8, 2), Blocks(64, 64, 4, 2), Blocks(32, 64, 4, 3), Blocks(32, 128, 8, 3)),
}


def list_choices(of_chip: KernelBlocks) -> list[KernelBlocks]:
    """Return the chip's blocks, and those that differ from them in one kernel."""
    others = [of_chip._replace(**{kernel: blocks}) for kernel, listed in CANDIDATES.items() for blocks in listed]
    return list(dict.fromkeys((of_chip, *others)))


def find_fastest(of_chip: KernelBlocks, times: Mapping[KernelBlocks, Times]) -> KernelBlocks:
    """Join the fastest blocks of each kernel; those of the chip stay where others gain too little.

    Blocks of one of the two kernels of the backward change the whole backward's time.
    """
    fastest = of_chip
    for kernel in KernelBlocks._fields:
        part = "forward" if kernel == "forward" else "backward"
        differing = {
            choice: getattr(time, part)
            for choice, time in times.items()
            if choice == of_chip._replace(**{kernel: getattr(choice, kernel)})
        }
        best = min(differing, key=differing.__getitem__)
        if differing[best] <= (1 - LEAST_GAIN) * differing[of_chip]:
            fastest = fastest._replace(**{kernel: getattr(best, kernel)})
    return fastest


def try_blocks(shape: Shape, device: str) -> str | None:
    """Return the name of the fastest blocks for the shape; None if none is faster than the chip's."""
    of_chip = choose_blocks(compute_width(shape.head_dim), torch.bfloat16, find_chip(torch.device(device)))
    try:
        times = _time(list_choices(of_chip), shape, device)
        if of_chip not in times:
            return None
        fastest = find_fastest(of_chip, times)
        if fastest == of_chip:
            return None
        # Kernels that are faster alone may not be faster together.
        again = _time([of_chip, fastest], shape, device)
    finally:
        use_blocks(BY_CHIP)
    is_faster = again.keys() == {of_chip, fastest} and again[fastest].both <= (1 - LEAST_GAIN) * again[of_chip].both
    return name_blocks(fastest) if is_faster else None


def _time(choices: list[KernelBlocks], shape: Shape, device: str) -> dict[KernelBlocks, Times]:
    """Return the times of the choices that run; they take turns."""
    make = gpu_times.shared(shape, ["triton"], device)["triton"]
    names = {name_blocks(choice): choice for choice in choices}
    makers: dict[str, Callable[[], Way]] = {name: functools.partial(_make, make, name) for name in names}
    return {names[name]: time for name, time in gpu_times.take_turns(makers, device, SECONDS_OF_A_CHOICE).items()}


def _make(make: Callable[[], Way], name: str) -> Way:
    """Return a way that uses these blocks for each forward, and for the backward after it."""
    way = make()
    attention = way.attention

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        use_blocks(name)
        return attention(*inputs)

    way.attention = attend
    return way
