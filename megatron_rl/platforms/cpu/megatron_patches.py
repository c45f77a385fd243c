"""Changes to modules of megatron itself that the CPU needs."""

import logging
from types import ModuleType

from megatron_rl.platforms.megatron_import import Patch, unknown_megatron

_FORK_WARNING = "CPU RNG state changed within GPU RNG context"


def disable_jit_fuser(module: ModuleType) -> None:
    """torch.compile would compile each fused function with a C++ compiler, for minutes, at its first call."""
    if not hasattr(module, "disable_jit_fuser"):
        raise unknown_megatron(f"{module.__name__} has no disable_jit_fuser")
    module.disable_jit_fuser()


def silence_fork_warning(module: ModuleType) -> None:
    """A fork of the device's random numbers warns if the host's changed within: here the two are the same."""
    logging.getLogger(module.__name__).addFilter(lambda record: _FORK_WARNING not in record.getMessage())


PATCHES = (
    Patch("jit fuser", "megatron.core.jit", disable_jit_fuser),
    Patch("warning of the RNG fork", "megatron.core.tensor_parallel.random", silence_fork_warning),
)
