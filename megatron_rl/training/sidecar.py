"""The sidecar that rank 0 starts, with the flags that the trainer was given, and ends."""

import dataclasses
import os
import sys
import time

from megatron_rl.config import Settings
from megatron_rl.errors import ExitCode, MegatronRLError, UsageError
from megatron_rl.flags import Flag, text_of
from megatron_rl.rollout.append_file import make_private_folder
from megatron_rl.rollout.client import RolloutClient, RolloutError, read_token
from megatron_rl.sidecar.launcher import Handle, LocalLauncher, ProcessSpec
from megatron_rl.sidecar.settings import SHARED, SidecarSettings, flags

_LOG = "sidecar.log"
_ADDRESS = "address"
_TOKEN = "token"
_OF_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_POLL_SECONDS = 0.1
_END_SECONDS = 30.0


class SidecarFailed(MegatronRLError):
    """A sidecar that this run started did not start, or ended."""

    exit_code = ExitCode.RUN


@dataclasses.dataclass(frozen=True)
class Address:
    """How a sidecar is reached."""

    endpoint: str
    token: str

    def client(self, patience: float) -> RolloutClient:
        return RolloutClient(self.endpoint, self.token, patience)


def check_reach(listen: str) -> None:
    """Ranks on other hosts must be able to reach a sidecar on this one."""
    is_alone = os.environ.get("WORLD_SIZE", "1") == os.environ.get(
        "LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")
    )
    host = listen.rpartition(":")[0]
    if not is_alone and (host == "localhost" or host.startswith("127.")):
        raise UsageError(
            f"--rollout-listen {listen} cannot be reached by the ranks on other hosts: write this "
            "host's address and a port, on a network that is yours alone, or --rollout-endpoint of a sidecar"
        )


def given_address(settings: Settings) -> Address:
    """Of the sidecar that flags name."""
    endpoint, folder = settings.service.endpoint, settings.rollout.folder
    assert endpoint is not None
    path = settings.service.token_file or (folder / _TOKEN if folder is not None else None)
    if path is None:
        raise UsageError(
            f"--rollout-token-file is missing: write the file with the token of {endpoint}, a copy of {_TOKEN} in its "
            "run's folder"
        )
    if not path.exists():
        raise UsageError(f"--rollout-token-file {path} does not exist: copy {_TOKEN} of the sidecar's run folder there")
    return Address(endpoint, read_token(path))


class OwnSidecar:
    """A process that ends with this one, whatever ends it. Started from the main thread: the kernel asks for that."""

    def __init__(self, settings: SidecarSettings):
        check_reach(settings.rollout.listen)
        folder = self._folder = settings.folder
        make_private_folder(folder)
        # What an earlier one left that could not tidy up.
        (folder / _ADDRESS).unlink(missing_ok=True)
        self._handle: Handle = LocalLauncher().start(
            ProcessSpec(
                name="sidecar",
                command=(sys.executable, "-m", "megatron_rl.sidecar", *words_of(settings)),
                environment=_environment(),
                address=str(folder / _ADDRESS),
                log=folder / _LOG,
            )
        )
        self._client: RolloutClient | None = None

    def address(self, seconds: float) -> Address:
        """Wait until it serves."""
        deadline = time.monotonic() + seconds
        path = self._folder / _ADDRESS
        while not path.exists():
            ended = self._handle.poll()
            if ended is not None:
                raise SidecarFailed(f"the sidecar {ended} before it served; the end of its log:\n{self._tail()}")
            if time.monotonic() > deadline:
                raise SidecarFailed(
                    f"the sidecar did not serve within {seconds / 60:g} minutes (--rollout-start-minutes); the end of "
                    f"its log, {self._folder / _LOG}:\n{self._tail()}"
                )
            time.sleep(_POLL_SECONDS)
        return Address(path.read_text().strip(), read_token(self._folder / _TOKEN))

    def close(self) -> None:
        """Ask it to end, and make it."""
        if self._handle.poll() is None and (self._folder / _ADDRESS).exists():
            try:
                with self.address(1.0).client(patience=1.0) as client:
                    client.shutdown()
                deadline = time.monotonic() + _END_SECONDS
                while self._handle.poll() is None and time.monotonic() < deadline:
                    time.sleep(_POLL_SECONDS)
            except (RolloutError, SidecarFailed):
                # It answers no more; it is ended all the same.
                pass
        self._handle.kill()

    def _tail(self) -> str:
        return self._handle.log_tail(20)


def _environment() -> dict[str, str]:
    """Ours, without what torchrun tells a rank: an engine would take itself for one."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_RANKS and not name.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_"))
    }


def words_of(sidecar: SidecarSettings) -> list[str]:
    """The sidecar's command line, which says these settings."""
    words = []
    for flag in flags():
        (target,) = flag.targets
        subject, _, field = target.partition(".")
        holder = sidecar if subject in SHARED else getattr(sidecar, subject)
        value = getattr(holder, field)
        if value != flag.default:
            words += _words(flag, value)
    return words


def _words(flag: Flag, value: object) -> list[str]:
    if flag.is_switch:
        return [flag.name]
    items = value if isinstance(value, list | tuple) else [value]
    return [flag.name, *(text_of(item) for item in items)]
