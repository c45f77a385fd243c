"""Starts vLLM engines, each on accelerators of its own."""

import dataclasses
from pathlib import Path

from megatron_rl.errors import UsageError
from megatron_rl.sidecar.launcher import Launcher
from megatron_rl.sidecar.vllm_engine import Deadlines, VllmEngine
from megatron_rl.sidecar.vllm_server import ServerConfig, spec


class VllmFactory:
    """Satisfies `megatron_rl.sidecar.supervisor.EngineFactory`."""

    def __init__(
        self,
        config: ServerConfig,
        folder: Path,
        launcher: Launcher,
        devices: tuple[tuple[int, ...], ...] = (),
        deadlines: Deadlines | None = None,
        logs: Path | None = None,
    ) -> None:
        """`folder` is private and short, for sockets; `logs` is where the engines' output goes, else the same."""
        self._config = config
        self._folder = folder
        self._logs = logs or folder
        self._launcher = launcher
        self._deadlines = deadlines or Deadlines()
        self._devices: dict[tuple[int, ...], str | None] = dict.fromkeys(devices)

    def create(self, name: str) -> VllmEngine:
        """Start the processes of an engine; `start()` of what this returns waits until they are ready."""
        config = dataclasses.replace(self._config, devices=self._take_devices(name))
        handle = self._launcher.start(spec(config, name, self._folder / name, self._logs / f"{name}.log"))
        return VllmEngine(name, handle.address, handle, self._deadlines)

    def adopt(self, name: str, address: str) -> VllmEngine:
        """An engine that somebody else started on this host, by the path of its socket."""
        return VllmEngine(name, address, None, self._deadlines)

    def release(self, name: str) -> None:
        """The engine of that name is gone for good."""
        for devices, holder in self._devices.items():
            if holder == name:
                self._devices[devices] = None

    def _take_devices(self, name: str) -> tuple[int, ...]:
        if not self._devices:
            return self._config.devices
        for devices, holder in self._devices.items():
            if holder in (None, name):
                self._devices[devices] = name
                return devices
        raise UsageError(
            f"engine {name} has no accelerators left: {len(self._devices)} sets are in use; give more with "
            "--rollout-devices or remove an engine"
        )
