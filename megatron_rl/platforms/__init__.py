"""The platform of a run: the kind of device that ranks run on, and the few operations that the package calls on it.

This is the one place that changes torch or megatron. Only here and in ops/ are CUDA and NPU known by name.
"""

import functools
import importlib.util
from collections.abc import Mapping
from types import ModuleType

import torch

from megatron_rl.errors import PlatformError, UsageError
from megatron_rl.platforms.platform import (
    KNOWN_WARNINGS,
    MemoryFigures,
    Platform,
    is_installed,
    sum_in_fixed_order,
)

__all__ = [
    "KNOWN_WARNINGS",
    "NAMES",
    "MemoryFigures",
    "Platform",
    "install_for_reading",
    "is_installed",
    "select",
    "sum_in_fixed_order",
]

_MODULES: Mapping[str, str] = {
    "cpu": "megatron_rl.platforms.cpu",
    "cuda": "megatron_rl.platforms.cuda",
    "npu": "megatron_rl.platforms.npu",
}
"""The module of each platform: a run imports its own, which may need other packages."""
NAMES = tuple(_MODULES)


def install_for_reading(platform: Platform) -> str | None:
    """Prepare for code that computes nothing; if the platform is missing, take the CPU's and return the reason."""
    try:
        platform.install()
    except PlatformError as error:
        if platform.name == "cpu":
            raise
        select("cpu").install()
        return str(error)
    return None


def select(name: str | None = None) -> Platform:
    """Return the platform of that name; without a name, or with "auto", the best platform of this machine."""
    if name is None or name == "auto":
        name = _detect()
    if name not in NAMES:
        raise UsageError(f"unknown platform {name!r}: write one of auto, {', '.join(NAMES)}")
    return _platform(name)


@functools.cache
def _platform(name: str) -> Platform:
    return getattr(_load(name), f"{name.capitalize()}Platform")()


def _load(name: str) -> ModuleType:
    return importlib.import_module(_MODULES[name])


def _detect() -> str:
    if importlib.util.find_spec("torch_npu") is not None and _load("npu").has_device():
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"
