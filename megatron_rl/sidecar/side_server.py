"""A vLLM server that the sidecar starts for itself, apart from the engines: a judge's or a teacher's."""

import asyncio
import contextlib
import dataclasses
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.shared.records.append_file import make_private_folder
from megatron_rl.sidecar.engines import EngineLost
from megatron_rl.sidecar.engines.hosts import OWN_HOST
from megatron_rl.sidecar.launcher import Handle, LocalLauncher, ProcessSpec
from megatron_rl.sidecar.settings import SidecarSettings
from megatron_rl.sidecar.temporary import make_socket_folder
from megatron_rl.sidecar.vllm.connection import Connection
from megatron_rl.sidecar.vllm.server import ServerConfig, make_process_spec

_POLL_SECONDS = 0.2
_HEALTH_SECONDS = 60.0


class SideServer:
    """Sends questions to the server of a process, at most `num_seqs` at once: alone, each has the same bits always."""

    def __init__(self, name: str, process: ProcessSpec, start_seconds: float, num_seqs: int = 1) -> None:
        self.name = name
        self._process, self._start_seconds = process, start_seconds
        self._places = asyncio.Semaphore(num_seqs)
        self._handle: Handle | None = None
        self._connection: Connection | None = None

    async def start(self) -> None:
        """Start the server and wait until it answers."""
        self._handle = LocalLauncher().start(self._process)
        self._connection = Connection(self.name, OWN_HOST.connect(self._handle.address), self._handle, _HEALTH_SECONDS)
        end = time.monotonic() + self._start_seconds
        while not await self._connection.is_healthy():
            if self._connection.fault or time.monotonic() > end:
                reason = self._connection.fault or f"not ready after {self._start_seconds:g} s"
                raise EngineLost(f"the {self.name} did not start: {reason}\n{self._connection.last_words()}")
            await asyncio.sleep(_POLL_SECONDS)

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()
        if self._handle is not None:
            await asyncio.to_thread(self._handle.kill)

    async def ask(self, route: str, content: Mapping[str, Any], seconds: float | None = None) -> Any:
        """Return the only choice of the answer; raise a TimeoutError if none comes within `seconds` of the question."""
        assert self._connection is not None
        async with self._places, asyncio.timeout(seconds):
            answer = await self._connection.post("answer", route, {"model": self.name, **content})
        (choice,) = answer["choices"]
        return choice


def open_server(
    name: str,
    folder: Path,
    devices: Sequence[int],
    flags: Sequence[str],
    settings: SidecarSettings,
    num_threads: int,
    stack: contextlib.AsyncExitStack,
    num_seqs: int = 1,
) -> SideServer:
    """Make the server of a model's folder, which is started later; its name is the model's too."""
    rollout, sockets = settings.rollout, make_socket_folder()
    stack.callback(shutil.rmtree, sockets, ignore_errors=True)
    config = ServerConfig(
        str(folder.resolve()),
        max_model_len=0,
        device=settings.device,
        tensor_parallel_size=len(devices or "1"),
        devices=tuple(devices),
        num_threads=num_threads,
        python=str(rollout.python or sys.executable),
    )
    make_private_folder(logs := settings.folder / "logs")
    process = make_process_spec(config, name, sockets / "server", logs / f"{name}.log")
    command = (
        config.python, "-m", "megatron_rl.sidecar.vllm.api_server",
        "--model", config.model, "--served-model-name", name, "--uds", process.address, "--disable-uvicorn-access-log",
        "--max-num-seqs", str(num_seqs), "--tensor-parallel-size", str(config.tensor_parallel_size),
        # Without the sampling parameters of the checkpoint's generation_config.json.
        "--generation-config", "vllm",
        *(["--no-enable-prefix-caching"] if num_seqs == 1 else []),
        *(["--enforce-eager"] if config.device == "cpu" else []),
        *flags,
    )  # fmt: skip
    return SideServer(name, dataclasses.replace(process, command=command), rollout.start_minutes * 60, num_seqs)
