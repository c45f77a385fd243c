"""The process of a host's agent: from its flags to its end."""

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_rl.errors import ExitCode, MegatronRLError, UsageError
from megatron_rl.flag_parser import FlagParser
from megatron_rl.shared.protocol.client import read_token
from megatron_rl.shared.protocol.hosts import check_certificate, is_loopback, parse_place
from megatron_rl.shared.records.append_file import make_private_folder
from megatron_rl.shared.weights.delivery.receiver import Receiver
from megatron_rl.sidecar.agent.application import build_agent_application
from megatron_rl.sidecar.agent.engines import HostEngines
from megatron_rl.sidecar.launcher import LocalLauncher
from megatron_rl.sidecar.serving import find_url, open_listener, serve, set_at_end
from megatron_rl.sidecar.temporary import make_folder, make_socket_folder

_log = logging.getLogger("megatron_rl.sidecar.agent")

_LEAST_TOKEN = 16
_MEMORY = Path("/dev/shm")
# Removes folders when its input ends: this process closes it, or the kernel does so. A scheduler sends SIGTERM to all
# processes of a job.
_REMOVE_AT_END = 'trap "" TERM; cat > /dev/null; rm -rf -- "$@"'


@dataclasses.dataclass(frozen=True)
class AgentSettings:
    listen: tuple[str, int]
    token: str
    folder: Path
    """The folder of its engines' logs."""
    shares_folder: bool = False
    """True: engines load weights from the folder that the trainer publishes to, which this host shares."""
    tls: tuple[Path, Path] | None = None
    """The files of its certificate and of the certificate's key."""


def run_from_words(words: Sequence[str]) -> int:
    """Run until told to end, and return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        settings = parse(words)
        asyncio.run(run(settings, LocalLauncher()))
    except MegatronRLError as error:
        print(f"megatron_rl.sidecar.agent: {error}", file=sys.stderr)
        return error.exit_code
    return ExitCode.OK


def parse(words: Sequence[str]) -> AgentSettings:
    """Parse and check flags; a UsageError has all mistakes."""
    parser = FlagParser(prog="python -m megatron_rl.sidecar.agent", description="Runs engines for a service elsewhere.")
    parser.add_argument("--listen", help="the address of this host that the service reaches, HOST:PORT or [HOST]:PORT")
    parser.add_argument("--token-file", type=Path, help="the file with the token, which only its owner may read")
    parser.add_argument("--tls-cert", type=Path, help="the file with the certificate that services check")
    parser.add_argument("--tls-key", type=Path, help="the file with the key of --tls-cert")
    parser.add_argument(
        "--shares-publish-folder",
        action="store_true",
        help="take no weights over TCP: this host shares the trainer's --publish-folder",
    )
    parser.add_argument("--folder", type=Path, help="the folder for the engines' logs")
    given = parser.parse_args(list(words))
    place, token, problems = _read_place(given), _read_token(given), []
    problems += [found for found in (place, token) if isinstance(found, str)]
    if "folder" not in given:
        problems.append("--folder is missing: name a folder for the engines' logs")
    cert, key = (getattr(given, name, None) for name in ("tls_cert", "tls_key"))
    tls = (cert, key) if cert is not None and key is not None else None
    problems += check_certificate(cert, key, "--tls")
    if isinstance(place, str) or isinstance(token, str) or problems:
        raise UsageError(*problems)
    return AgentSettings(place, token[0], given.folder, "shares_publish_folder" in given, tls)


def _make_receiver(settings: AgentSettings, folder: Path, token: str) -> Receiver:
    """Make a receiver of weights at the port after the agent's."""
    host, port = settings.listen
    make_private_folder(folder)
    place = port + 1 if port else 0
    try:
        return Receiver(folder, token, host, place)
    except OSError as error:
        raise UsageError(
            f"the port {place}, at which this host takes weights, cannot be opened: {error}: start the agent with "
            "another port in --listen"
        ) from None


async def run(settings: AgentSettings, launcher: LocalLauncher) -> None:
    """Serve until a signal, end all engines, and remove what they have left."""
    ended = asyncio.Event()
    set_at_end(ended)
    make_private_folder(settings.folder)
    listener = open_listener(*settings.listen, flag="--listen")
    sockets, memory = make_socket_folder(), make_folder("megatron_rl-agent-", _MEMORY)
    receive = None
    if not settings.shares_folder:
        receive = functools.partial(_make_receiver, settings, memory / "weights")
    with removed_afterwards(sockets, memory):
        await _serve(settings, listener, HostEngines(sockets, settings.folder, launcher, receive), ended)


async def _serve(settings: AgentSettings, listener: socket.socket, engines: HostEngines, ended: asyncio.Event) -> None:
    watching = asyncio.create_task(engines.watch())
    watching.add_done_callback(lambda _: ended.set())
    try:
        url = find_url(listener, "http" if settings.tls is None else "https")
        _log.info("this host's agent serves at %s; engines log to %s", url, settings.folder)
        if settings.tls is None and not is_loopback(settings.listen[0]):
            _log.warning(
                "nothing is encrypted between this host and the service, the token included: use a network that only "
                "your hosts share, or give the agent a certificate (--tls-cert, --tls-key)"
            )
        app = build_agent_application(engines, settings.token)
        await serve(app, listener=listener, until=ended, tls=settings.tls)
    finally:
        watching.cancel()
        await engines.leave()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


def _read_place(given: argparse.Namespace) -> tuple[str, int] | str:
    """Return the place to listen at, or what is wrong with it."""
    if "listen" not in given:
        return "--listen is missing: write this host's address and a port, such as 10.0.0.2:7100"
    place = parse_place(given.listen)
    return place or f"--listen {given.listen} must be HOST:PORT: write 10.0.0.2:7100, or one of IPv6 in brackets"


def _read_token(given: argparse.Namespace) -> tuple[str] | str:
    """Return the token, or what is wrong with its file."""
    making = "write one with (umask 077; openssl rand -hex 32 > FILE), and give each host the same"
    if "token_file" not in given:
        return f"--token-file is missing: {making}"
    try:
        token = read_token(given.token_file)
    except (OSError, MegatronRLError) as error:
        return f"--token-file {given.token_file} cannot be used: {error}: {making}"
    if len(token) < _LEAST_TOKEN:
        return f"--token-file {given.token_file} must hold a token of {_LEAST_TOKEN} characters or more: {making}"
    return (token,)


@contextlib.contextmanager
def removed_afterwards(*folders: Path) -> Iterator[None]:
    """Remove folders with all that is in them, at the end of the context or of this process, also if it is killed."""
    # In a session of its own, it does not get the signals of a terminal.
    guard = subprocess.Popen(
        ["sh", "-c", _REMOVE_AT_END, "sh", *map(str, folders)], stdin=subprocess.PIPE, start_new_session=True
    )
    assert guard.stdin is not None
    try:
        yield
    finally:
        guard.stdin.close()
        guard.wait()
