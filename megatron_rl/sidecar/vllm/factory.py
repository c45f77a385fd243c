"""Starts vLLM servers, each with accelerators of its own, and adopts those that were started elsewhere."""

import dataclasses
from pathlib import Path

from megatron_rl.errors import UsageError
from megatron_rl.sidecar.attempts import Pace
from megatron_rl.sidecar.engines import EngineHost
from megatron_rl.sidecar.engines.hosts import OWN_HOST
from megatron_rl.sidecar.launcher import Handle, LocalLauncher
from megatron_rl.sidecar.vllm.engine import LEAST_SECONDS, Deadlines, NoteStart, VllmEngine
from megatron_rl.sidecar.vllm.server import ServerConfig, make_process_spec


class VllmFactory:
    """Satisfies `megatron_rl.sidecar.supervisor.EngineFactory`."""

    def __init__(
        self,
        config: ServerConfig,
        folder: Path,
        launcher: LocalLauncher,
        devices: tuple[tuple[int, ...], ...] = (),
        deadlines: Deadlines | None = None,
        logs: Path | None = None,
        note_start: NoteStart = lambda name, seconds: None,
    ) -> None:
        """Make a factory.

        `folder` is private and has a short path, for sockets. The engines' output goes to `logs`, or else to `folder`.
        `note_start` gets the parts of each engine's start.
        """
        self._config = config
        self._folder = folder
        self._logs = logs or folder
        self._launcher = launcher
        self._deadlines = deadlines or Deadlines()
        self._pace = Pace(LEAST_SECONDS)
        self._note_start = note_start
        self._devices: dict[tuple[int, ...], str | None] = dict.fromkeys(devices)

    def create(self, name: str) -> VllmEngine:
        """Start the processes of an engine; the engine's `start()` waits until they are ready."""
        config = dataclasses.replace(self._config, devices=self._take_devices(name))
        handle = self._launcher.start(make_process_spec(config, name, self._folder / name, self._logs / f"{name}.log"))
        return self.make_engine(name, handle.address, handle)

    def adopt(self, name: str, address: str) -> VllmEngine:
        """Use an engine that was started elsewhere on this host, given the path of its socket."""
        return self.make_engine(name, address, None)

    def make_engine(self, name: str, address: str, handle: Handle | None, host: EngineHost = OWN_HOST) -> VllmEngine:
        """Make an engine at an address of a host; without a handle, its processes were started elsewhere."""
        return VllmEngine(
            name,
            address,
            handle,
            self._deadlines,
            pace=self._pace,
            note_start=self._note_start,
            scoring=self._config.scoring,
            replays_routing=self._config.replays_routing,
            host=host,
        )

    def release(self, name: str) -> None:
        """Free the devices of an engine that will not return."""
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
            f"engine {name} has no accelerators left: all {len(self._devices)} sets are in use; name more with "
            "--rollout-devices, or remove an engine"
        )
