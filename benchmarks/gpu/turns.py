"""Measures several ways of doing the same in turns, on a device whose work is waited for."""

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from megatron_rl.platforms import Platform

Act = Callable[[], object]


def time_once(act: Act, platform: Platform) -> float:
    """Return the seconds until the device has done it."""
    platform.synchronize()
    begun = time.perf_counter()
    act()
    platform.synchronize()
    return time.perf_counter() - begun


def take_turns(
    acts: Mapping[str, Act], platform: Platform, num_rounds: int, has_time: Callable[[], bool]
) -> dict[str, float]:
    """Return the median seconds of each; one round at least is measured, after one that warms up."""
    for act in acts.values():
        act()
    rounds: dict[str, list[float]] = {name: [] for name in acts}
    for number in range(num_rounds):
        if number and not has_time():
            break
        for name, act in acts.items():
            rounds[name].append(time_once(act, platform))
    return {name: statistics.median(seconds) for name, seconds in rounds.items()}


def release(platform: Platform) -> None:
    """Give unused memory back, so that the next way finds it."""
    gc.collect()
    if platform.device_type == "cuda":
        torch.cuda.empty_cache()


@dataclasses.dataclass(frozen=True)
class Peak:
    """GiB of memory."""

    whole: float
    """The most that is held at a time."""
    above: float
    """The same, without what was held before."""


def measure_peak(act: Act, platform: Platform) -> Peak:
    """Return the memory that it takes at its peak."""
    release(platform)
    platform.reset_peak_memory()
    before = platform.memory().peak
    act()
    platform.synchronize()
    peak = platform.memory().peak
    return Peak(peak / 2**30, max(0, peak - before) / 2**30)
