"""A plugin of vLLM's with which an engine on a CPU schedules steps ahead, as engines on GPUs do.

vLLM switches this off on CPUs as not worth it; the scheduler, the core's queue of steps and the runner are the same.
"""

import contextlib
from pathlib import Path
from typing import Any

import torch

ENTRY_POINTS = f"[vllm.general_plugins]\nasync_on_cpu = {__name__}:register\n"


def install(folder: Path) -> None:
    """Make the plugin known to interpreters that have this folder in their PYTHONPATH."""
    described = folder / "async_on_cpu-1.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: async-on-cpu\nVersion: 1\n")
    (described / "entry_points.txt").write_text(ENTRY_POINTS)


class _NoQueue:
    """A stream or an event of a device without queues."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...


def register() -> None:
    """Keep the choice that vLLM makes for GPUs."""
    from vllm.platforms.cpu import CpuPlatform

    check: Any = CpuPlatform.check_and_update_config

    def check_and_keep(config: Any) -> None:
        chosen = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = chosen

    named: Any = CpuPlatform
    named.check_and_update_config = staticmethod(check_and_keep)
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = cuda.current_stream = _NoQueue
    cuda.stream = lambda _: contextlib.nullcontext()
