"""The machine: which kind of device the ranks run on, and the few operations the rest of the package calls on it.

This is the one place that changes torch or megatron, and the only one beside ops/ that knows CUDA and NPU by name.
"""

import functools
import importlib.util

from megatron_rl.errors import UsageError
from megatron_rl.platforms.base import MemoryFigures, Platform

__all__ = ["NAMES", "MemoryFigures", "Platform", "select"]

NAMES = ("cpu", "cuda", "npu")


def select(name: str | None = None) -> Platform:
    """The platform of that name; without one, or with "auto", the best that this machine has."""
    if name is None or name == "auto":
        name = _detect()
    if name not in NAMES:
        raise UsageError(f"unknown platform {name!r}; write one of auto, {', '.join(NAMES)}")
    return _platform(name)


@functools.cache
def _platform(name: str) -> Platform:
    # Imported here, because each of them needs packages that the others do not.
    if name == "npu":
        from megatron_rl.platforms.npu import NpuPlatform

        return NpuPlatform()
    if name == "cuda":
        from megatron_rl.platforms.cuda import CudaPlatform

        return CudaPlatform()
    from megatron_rl.platforms.cpu import CpuPlatform

    return CpuPlatform()


def _detect() -> str:
    import torch

    if importlib.util.find_spec("torch_npu") is not None:
        from megatron_rl.platforms.npu import has_device

        if has_device():
            return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"
