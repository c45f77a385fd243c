"""The sidecar that rank 0 starts, with settings that follow from the run's, and ends."""

import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron_rl.config.settings import DraftSettings
from megatron_rl.errors import ExitCode, InputError, MegatronRLError, PlatformError, UsageError
from megatron_rl.shared.protocol.client import RolloutClient, RolloutError, read_token
from megatron_rl.shared.protocol.hosts import is_loopback, parse_place
from megatron_rl.shared.protocol.wire import Prompt
from megatron_rl.shared.records.append_file import make_private_folder
from megatron_rl.sidecar import settings as sidecar_settings
from megatron_rl.sidecar import starting
from megatron_rl.sidecar.launcher import LocalLauncher, ProcessSpec
from megatron_rl.sidecar.settings import LAST_WORDS, MESSAGE_FLAG, SidecarSettings, write_message
from megatron_rl.sidecar.starting import News

_LOG = "sidecar.log"
MESSAGE_FILE = "sidecar.json"
SIDECAR = "megatron_rl.sidecar"
_ADDRESS = "address"
_TOKEN = "token"
_OF_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_POLL_SECONDS = 0.1
_END_SECONDS = 30.0
_LEAVE_SECONDS = 1.0

_NUM_LINES = 20


class SidecarFailed(MegatronRLError):
    """The sidecar of this run did not start, or has ended."""

    exit_code = ExitCode.RUN


# If a sidecar names its error, the run ends with the same kind of error.
_KINDS = {int(kind.exit_code): kind for kind in (UsageError, PlatformError, InputError)}


@dataclasses.dataclass(frozen=True)
class Address:
    endpoint: str
    token: str

    def client(self, patience: float) -> RolloutClient:
        return RolloutClient(self.endpoint, self.token, patience)


def problems(settings: DraftSettings, sidecar: SidecarSettings | None, longest: int | None) -> Iterator[str]:
    """Yield each mistake that would end the run's sidecar; prompt and response have at most `longest` tokens.

    `sidecar` is None if one is running already; `longest` is None if the lengths are not known.
    """
    if sidecar is None:
        try:
            read_given_address(settings)
        except UsageError as error:
            yield from error.problems
        return
    yield from sidecar_settings.problems(sidecar, settings.architecture, longest)
    yield from _problems_of_reach(sidecar.rollout.listen)


def _problems_of_reach(listen: str) -> Iterator[str]:
    """Yield a problem if ranks on other hosts cannot reach a sidecar on this one."""
    is_alone = os.environ.get("WORLD_SIZE", "1") == os.environ.get(
        "LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")
    )
    place = parse_place(listen)
    if not is_alone and place is not None and is_loopback(place[0]):
        yield (
            f"--rollout-listen {listen} cannot be reached from the other hosts: write this host's address and a port, "
            "on a private network, or --rollout-endpoint of a running sidecar"
        )


def read_given_address(settings: DraftSettings) -> Address:
    """Return the address of the sidecar that flags name."""
    endpoint, folder = settings.service.endpoint, settings.rollout.folder
    assert endpoint is not None
    path = settings.service.token_file or (folder / _TOKEN if folder is not None else None)
    if path is None:
        raise UsageError(
            f"--rollout-token-file is missing: name a copy of the file {_TOKEN} in the run's folder of the sidecar at "
            f"{endpoint}"
        )
    if not path.exists():
        raise UsageError(f"--rollout-token-file {path} does not exist: copy {_TOKEN} of the sidecar's run folder there")
    return Address(endpoint, read_token(path))


class OwnSidecar:
    """A process that ends with this one, however this one ends.

    The kernel ties it to the thread that starts it, so that must be the main thread.
    """

    def __init__(self, settings: SidecarSettings, module: str = SIDECAR):
        """Start the process, of this module. It serves once it has tried its rewards on the rows of `try_rewards`."""
        folder = self._folder = settings.folder
        make_private_folder(folder)
        # An earlier sidecar may have left them if it was killed.
        for name in (_ADDRESS, starting.FILE_NAME, starting.TRIALS_FILE):
            (folder / name).unlink(missing_ok=True)
        write_message(folder / MESSAGE_FILE, settings)
        self._handle = LocalLauncher().start(
            ProcessSpec(
                name="sidecar",
                command=(sys.executable, "-m", module, MESSAGE_FLAG, str(folder / MESSAGE_FILE)),
                environment=_environment(),
                address=str(folder / _ADDRESS),
                log=folder / _LOG,
            )
        )

    @property
    def log(self) -> Path:
        return self._handle.log

    def try_rewards(self, prompts: Sequence[Prompt]) -> None:
        """Hand over the rows that it waits for, on which it tries its rewards."""
        starting.write_trials(self._folder / starting.TRIALS_FILE, prompts)

    def address(self, seconds: float) -> Address:
        """Wait until it serves, at most for these seconds, and return its address."""
        deadline = time.monotonic() + seconds
        path = self._folder / _ADDRESS
        while not path.exists():
            self.check()
            if time.monotonic() > deadline:
                raise SidecarFailed(
                    f"the sidecar did not serve within {seconds:g} s (--rollout-start-minutes); the end of "
                    f"its log, {self._handle.log}:\n{self._tail()}"
                )
            time.sleep(_POLL_SECONDS)
        return Address(path.read_text().strip(), read_token(self._folder / _TOKEN))

    def check(self) -> None:
        """Raise the sidecar's last error, of the same kind, if it has ended."""
        ended, code = self._handle.poll(), self._handle.exit_code
        if ended is None or code is None:
            return
        _, is_by_name, said = "\n".join(["", *self._handle.log_lines()]).rpartition(f"\n{LAST_WORDS}")
        if is_by_name:
            kind = _KINDS.get(code, SidecarFailed)
            raise kind(f"{said.strip()}\n(the sidecar {ended}; its log is {self._handle.log})")
        raise SidecarFailed(f"the sidecar {ended}; the end of its log, {self._handle.log}:\n{self._tail()}")

    @contextlib.contextmanager
    def reported(self, failed: Callable[[MegatronRLError], object], say: Callable[[str], object]) -> Iterator[None]:
        """Report the progress of the sidecar's start within a context, and call `failed` at once if it ends."""
        news = News(self._folder / starting.FILE_NAME)

        def tell() -> None:
            for line in news.lines(time.monotonic()):
                say(line)

        with self.watched(failed, each_look=tell):
            yield
        tell()

    @contextlib.contextmanager
    def watched(
        self,
        failed: Callable[[MegatronRLError], object],
        is_busy: Callable[[], bool] = lambda: False,
        each_look: Callable[[], object] = lambda: None,
    ) -> Iterator[None]:
        """Call `failed`, within a context and from another thread, as soon as the sidecar has ended.

        While the caller `is_busy` with work that needs no sidecar, wait for the end of that work. If the caller then
        leaves the context, nothing has failed.
        """
        over = threading.Event()

        def look() -> None:
            while not over.wait(_POLL_SECONDS):
                try:
                    self.check()
                except MegatronRLError as error:
                    while is_busy():
                        # The caller may now leave the context.
                        over.wait(_LEAVE_SECONDS)
                    if not over.is_set():
                        failed(error)
                    return
                each_look()

        thread = threading.Thread(target=look, name="sidecar", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def close(self) -> None:
        """Ask the sidecar to end, and then kill it."""
        if self._handle.poll() is None and (self._folder / _ADDRESS).exists():
            try:
                with self.address(1.0).client(patience=1.0) as client:
                    client.shutdown()
                deadline = time.monotonic() + _END_SECONDS
                while self._handle.poll() is None and time.monotonic() < deadline:
                    time.sleep(_POLL_SECONDS)
            except (RolloutError, SidecarFailed):
                # It does not answer, and is killed anyway.
                pass
        self._handle.kill()

    def _tail(self) -> str:
        return "\n".join(self._handle.log_lines()[-_NUM_LINES:])


def _environment() -> dict[str, str]:
    """Return our environment without torchrun's variables, which would make an engine take itself for a rank."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_RANKS and not name.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_"))
    }
