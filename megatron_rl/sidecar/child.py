"""The sidecar that rank 0 starts, with the flags that the trainer was given, and ends."""

import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_rl.config.flag import Flag, text_of
from megatron_rl.config.settings import Settings
from megatron_rl.errors import ExitCode, InputError, MegatronRLError, PlatformError, UsageError
from megatron_rl.protocol.client import RolloutClient, RolloutError, read_token
from megatron_rl.protocol.wire import Prompt
from megatron_rl.records.append_file import make_private_folder
from megatron_rl.sidecar import settings as sidecar_settings
from megatron_rl.sidecar import starting
from megatron_rl.sidecar.launcher import LocalLauncher, ProcessSpec
from megatron_rl.sidecar.settings import LAST_WORDS, SHARED, SidecarSettings, list_flags
from megatron_rl.sidecar.starting import News

_LOG = "sidecar.log"
_ADDRESS = "address"
_TOKEN = "token"
_OF_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_POLL_SECONDS = 0.1
_END_SECONDS = 30.0


_NUM_LINES = 20


class SidecarFailed(MegatronRLError):
    """A sidecar that this run started did not start, or ended."""

    exit_code = ExitCode.RUN


# A sidecar that ends by name ends the run with its own kind of error.
_KINDS = {int(kind.exit_code): kind for kind in (UsageError, PlatformError, InputError)}


@dataclasses.dataclass(frozen=True)
class Address:
    """How a sidecar is reached."""

    endpoint: str
    token: str

    def client(self, patience: float) -> RolloutClient:
        return RolloutClient(self.endpoint, self.token, patience)


def problems(settings: Settings, sidecar: SidecarSettings | None, longest: int | None) -> Iterator[str]:
    """Each thing that the sidecar of a run would end for, with prompt and response of `longest` tokens at most.

    Of the one that runs already, where none is started; where the lengths are not known they are not compared.
    """
    if sidecar is None:
        try:
            read_given_address(settings)
        except UsageError as error:
            yield from error.problems
        return
    yield from sidecar_settings.problems(sidecar, settings.architecture)
    yield from _problems_of_reach(sidecar.rollout.listen)
    room = sidecar.rollout.max_model_len
    if room is not None and longest is not None and 0 < room < longest and sidecar.rollout.engine == "vllm":
        yield (
            f"--rollout-max-model-len {room} has no room for the {longest} tokens that a prompt and its response may "
            f"have: write {longest} or more, or leave it out"
        )


def _problems_of_reach(listen: str) -> Iterator[str]:
    """Ranks on other hosts must be able to reach a sidecar on this one."""
    is_alone = os.environ.get("WORLD_SIZE", "1") == os.environ.get(
        "LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")
    )
    host = listen.rpartition(":")[0]
    if not is_alone and (host == "localhost" or host.startswith("127.")):
        yield (
            f"--rollout-listen {listen} cannot be reached by the ranks on other hosts: write this "
            "host's address and a port, on a network that is yours alone, or --rollout-endpoint of a sidecar"
        )


def read_given_address(settings: Settings) -> Address:
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

    def __init__(self, settings: SidecarSettings, trial: Prompt | None = None):
        """Before it starts engines it tries its rewards on the row `trial`."""
        folder = self._folder = settings.folder
        make_private_folder(folder)
        # What an earlier one left that could not tidy up.
        for name in (_ADDRESS, starting.FILE_NAME, starting.TRIAL_FILE):
            (folder / name).unlink(missing_ok=True)
        if trial is not None:
            starting.write_trial(folder / starting.TRIAL_FILE, trial)
        self._handle = LocalLauncher().start(
            ProcessSpec(
                name="sidecar",
                command=(sys.executable, "-m", "megatron_rl.sidecar", *write_words(settings)),
                environment=_environment(),
                address=str(folder / _ADDRESS),
                log=folder / _LOG,
            )
        )
        self._client: RolloutClient | None = None

    @property
    def log(self) -> Path:
        """Where what it prints is kept."""
        return self._handle.log

    def address(self, seconds: float) -> Address:
        """Wait until it serves."""
        deadline = time.monotonic() + seconds
        path = self._folder / _ADDRESS
        while not path.exists():
            self.check()
            if time.monotonic() > deadline:
                raise SidecarFailed(
                    f"the sidecar did not serve within {seconds / 60:g} minutes (--rollout-start-minutes); the end of "
                    f"its log, {self._handle.log}:\n{self._tail()}"
                )
            time.sleep(_POLL_SECONDS)
        return Address(path.read_text().strip(), read_token(self._folder / _TOKEN))

    def check(self) -> None:
        """Raise if it has ended: what it said of that, as an error of its own kind."""
        ended, code = self._handle.poll(), self._handle.exit_code
        if ended is None or code is None:
            return
        _, is_by_name, said = "\n".join(["", *self._handle.log_lines()]).rpartition(f"\n{LAST_WORDS}")
        if is_by_name:
            kind = _KINDS.get(code, SidecarFailed)
            raise kind(f"{said.strip()}\n(the sidecar {ended}; its log is {self._handle.log})")
        raise SidecarFailed(f"the sidecar {ended}; the end of its log, {self._handle.log}:\n{self._tail()}")

    @contextlib.contextmanager
    def watched(self, failed: Callable[[MegatronRLError], object], say: Callable[[str], object]) -> Iterator[None]:
        """Within this context say how far the sidecar is, and at once that it ended, whatever the caller waits for."""
        over = threading.Event()
        news = News(self._folder / starting.FILE_NAME)

        def tell() -> None:
            for line in news.lines(time.monotonic()):
                say(line)

        def poll() -> None:
            while not over.wait(_POLL_SECONDS):
                try:
                    self.check()
                except MegatronRLError as error:
                    failed(error)
                    return
                tell()

        thread = threading.Thread(target=poll, name="sidecar", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        tell()

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
        return "\n".join(self._handle.log_lines()[-_NUM_LINES:])


def _environment() -> dict[str, str]:
    """Ours, without what torchrun tells a rank: an engine would take itself for one."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_RANKS and not name.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_"))
    }


def write_words(sidecar: SidecarSettings) -> list[str]:
    """The sidecar's command line, which says these settings."""
    words = []
    for flag in list_flags():
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
