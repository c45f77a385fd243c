"""The memory of a device that a rank and an engine share (--rollout-colocate), divided before the engine starts."""

import contextlib
import dataclasses
import os
import subprocess
import sys
from types import TracebackType
from typing import Self

from megatron_rl import platforms
from megatron_rl.command_line.run import RunSettings
from megatron_rl.config.settings import Settings
from megatron_rl.errors import UsageError
from megatron_rl.sidecar.settings import SidecarSettings
from megatron_rl.sidecar.vllm import memory
from megatron_rl.sidecar.vllm.flags import FLAG

# The count is for megatron's modules on the host; these follow the rank's own flags, and the last value counts.
_ON_HOST = (
    "--platform", "cpu", "--shared-prompt-backend", "auto", "--output-layer-backend", "auto",
    "--elementwise-backend", "auto", "--qkv-backend", "auto", "--linear-attention-backend", "auto",
)  # fmt: skip
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_SECONDS = 300


class RankCount(contextlib.AbstractContextManager["RankCount"]):
    """A count of a rank's memory in a process of its own, beside whatever the rank does meanwhile."""

    def __init__(self, settings: RunSettings) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
        module = "megatron_rl.trainer.loop.rank_memory"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(settings.world_size or 1), *settings.words, *_ON_HOST],
            # No device is visible, so that the process makes no context on one.
            env={**environment, "CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def wait(self) -> int:
        """Return the bytes of the largest rank; raise a UsageError if they cannot be counted."""
        try:
            output, errors = self._process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            raise UsageError(_describe_failure(f"it took more than {_SECONDS} s")) from None
        if self._process.returncode:
            raise UsageError(_describe_failure((errors.strip() or "no reason was given").splitlines()[-1]))
        return int(output.splitlines()[-1])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self


def begin_count(settings: RunSettings) -> RankCount | None:
    """Begin to count a rank's memory if the run divides a device; the caller closes the count."""
    sidecar = settings.sidecar
    is_shared = sidecar is not None and sidecar.rollout.is_colocated
    return RankCount(settings) if is_shared and not memory.is_divided_by_user(settings.rollout.vllm_args) else None


def share_device(settings: RunSettings, count: RankCount | None) -> tuple[SidecarSettings, str]:
    """Return the settings of engines that share the ranks' devices, and a line that says how memory is divided."""
    sidecar = settings.sidecar
    assert sidecar is not None
    if count is None:
        return sidecar, f"device memory: {FLAG} divides it between ranks and engines"
    device = platforms.select(settings.platform).memory().total
    division = divide_device(settings, device, count.wait())
    return dataclasses.replace(sidecar, memory=division.memory), division.describe()


def divide_device(settings: Settings, device: int, counted: int) -> memory.SharedDevice:
    """Divide a device of these bytes between a rank, with its counted bytes, and an engine with these settings."""
    rollout = settings.rollout
    length = rollout.max_model_len or settings.training.seq_length
    assert length is not None
    needs = memory.count_needs(
        settings.architecture,
        rollout.dtype or settings.architecture.dtype,
        rollout.tensor_parallel_size,
        rollout.max_num_seqs,
        length,
        rollout.lora_rank,
    )
    return memory.divide(device, counted, needs)


def _describe_failure(reason: str) -> str:
    return (
        f"{memory.FLAG_OF_SHARING}: the memory of a rank could not be counted: {reason}: divide the device yourself, "
        f"with {FLAG}='{memory.MEMORY_FLAGS[0]} 0.3'"
    )
