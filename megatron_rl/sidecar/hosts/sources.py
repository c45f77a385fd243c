"""The hosts that a FILE of `--rollout-hosts` names. All mistakes in FILE are reported at once.

With the kind `static` it describes each of them, and their agents run already. With `slurm` and `kubernetes` a
scheduler has started their agents, and all hosts are alike: FILE describes them by one table, [every_host], and a table
of its kind says which there are.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import shutil
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import httpx

from megatron_rl.errors import ExitCode, MegatronRLError, UsageError
from megatron_rl.flag import suggest_nearest
from megatron_rl.shared.protocol.client import read_token
from megatron_rl.shared.protocol.hosts import parse_place
from megatron_rl.sidecar.hosts import (
    DEFAULT_PORT,
    FLAG,
    STATIC,
    TOKEN_FILE,
    HostList,
    HostPlace,
    read_toml,
    split_value,
)

_log = logging.getLogger(__name__)

_TLS_CA = "tls_ca"
_ACCESS_KEYS = (TOKEN_FILE, _TLS_CA)
_TOGETHER = "together"
_EVERY = "every_host"
_HOSTS_PER_ENGINE = "hosts_per_engine"
_PAUSE_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
_NEWS_SECONDS = 30.0

T = TypeVar("T")


class StaticSource:
    """The hosts of a file, which is read again while the run follows it."""

    def __init__(self, text: str, tensor_parallel_size: int) -> None:
        self._text = text
        self._size = tensor_parallel_size
        self._read()

    @contextlib.asynccontextmanager
    async def opened(self, seconds: float) -> AsyncIterator[Callable[[], HostList]]:
        yield self._read

    def _read(self) -> HostList:
        return read_hosts(self._text, self._size)


def read_hosts(text: str, tensor_parallel_size: int) -> HostList:
    """Read the file that a value of the flag names; a UsageError has all mistakes."""
    kind, _, name = text.partition(":")
    if kind != STATIC or not name:
        raise UsageError(f"{FLAG} {text} must be {STATIC}:FILE, a TOML file with a [[host]] for each host")
    content, token, tls_ca = _read_file(text, lambda content: _check_listed(content, tensor_parallel_size))
    return HostList(tuple(_make_place(entry) for entry in content["host"]), token, tls_ca)


def _read_file(
    text: str, check: Callable[[dict[str, Any]], Iterator[str]], problems: Sequence[str] = ()
) -> tuple[dict[str, Any], str, Path | None]:
    """Read FILE, the token and the certificates that it names; a UsageError has all mistakes, and these problems."""
    _, path = split_value(text)
    content = read_toml(text, path)
    token, tls_ca, of_access = _read_access(content, path)
    if found := [*problems, *(f"{FLAG} {path}: {problem}" for problem in [*of_access, *check(content)])]:
        raise UsageError(*found)
    return content, token, tls_ca


def _read_access(content: dict[str, Any], path: Path) -> tuple[str, Path | None, list[str]]:
    """Return the agents' token and the certificates that theirs must be signed by, and what is wrong with them."""
    problems = []
    token = ""
    if not isinstance(content.get(TOKEN_FILE), str):
        problems.append(f'{TOKEN_FILE} is missing: write {TOKEN_FILE} = "FILE", the file of the token of all agents')
    else:
        try:
            token = read_token(path.parent / content[TOKEN_FILE])
        except (OSError, MegatronRLError) as error:
            problems.append(f"{TOKEN_FILE}: {error}")
    tls_ca = None
    if not isinstance(content.get(_TLS_CA, ""), str):
        problems.append(f"{_TLS_CA} must be the path of a PEM file")
    elif _TLS_CA in content:
        tls_ca = path.parent / content[_TLS_CA]
        try:
            ssl.create_default_context(cafile=tls_ca)
        except OSError as error:
            problems.append(f"{_TLS_CA} {tls_ca} cannot be used: {error}: name a PEM file")
    return token, tls_ca, problems


def _make_place(entry: dict[str, Any]) -> HostPlace:
    devices = entry.get("devices")
    return HostPlace(**{**entry, "devices": None if devices is None else tuple(devices)})


def _check_listed(content: dict[str, Any], tensor_parallel_size: int) -> Iterator[str]:
    known = (*_ACCESS_KEYS, "host")
    for key in sorted(content.keys() - set(known)):
        yield f"unknown key {key!r}{suggest_nearest(key, known)}"
    hosts = content.get("host")
    if not isinstance(hosts, list) or not hosts or not all(isinstance(entry, dict) for entry in hosts):
        yield 'no host is named: write a [[host]] with address = "HOST:PORT" for each'
        return
    seen: set[str] = set()
    words = [str(entry.get(_TOGETHER, "")) for entry in hosts]
    yield from _check_together(hosts, words, tensor_parallel_size)
    for number, (entry, word) in enumerate(zip(hosts, words, strict=True), 1):
        address = entry.get("address")
        size = tensor_parallel_size // words.count(word) if word else tensor_parallel_size
        yield from (f"host {number} ({address}): {problem}" for problem in _check_host(entry, size))
        if str(address) in seen:
            yield f"host {number} ({address}) is named twice: write it once, with the number of its engines"
        seen.add(str(address))


def _check_together(hosts: list[dict[str, Any]], words: list[str], tensor_parallel_size: int) -> Iterator[str]:
    """Yield each mistake in hosts that run engines together."""
    for word in dict.fromkeys(filter(None, words)):
        members = [entry for entry, named in zip(hosts, words, strict=True) if named == word]
        said = f'{_TOGETHER} = "{word}"'
        if len(members) == 1:
            yield f"{said} is said of one host only: write it for each host of these engines, or drop it"
        elif tensor_parallel_size % len(members):
            yield (
                f"{said}: --rollout-tensor-parallel-size {tensor_parallel_size} cannot be divided over "
                f"{len(members)} hosts: write a multiple of {len(members)}"
            )
        if len({str(entry.get("engines", 1)) for entry in members}) > 1:
            yield f"{said}: its hosts must have the same number of engines, since each engine is on all of them"


def _check_host(entry: dict[str, Any], tensor_parallel_size: int) -> Iterator[str]:
    """Yield each mistake in the description of a host."""
    known = [field.name for field in dataclasses.fields(HostPlace)]
    for key in sorted(entry.keys() - set(known)):
        yield f"unknown key {key!r}{suggest_nearest(key, known)}"
    address = entry.get("address")
    place = parse_place(address) if isinstance(address, str) else None
    if place is None or place[1] == 0:
        yield "address must be HOST:PORT, the address at which its agent listens"
    for key in ("python", "model"):
        if not isinstance(entry.get(key, ""), str):
            yield f"{key} must be a path on that host"
    if not isinstance(entry.get(_TOGETHER, ""), str):
        yield f"{_TOGETHER} must be a word in quotes, the same for all hosts that share engines"
    engines = entry.get("engines", 1)
    if not isinstance(engines, int) or isinstance(engines, bool) or engines < 1:
        yield f"engines = {engines!r} must be a number of at least 1"
        return
    devices = entry.get("devices")
    if devices is None:
        return
    if not isinstance(devices, list) or any(not isinstance(device, int) or device < 0 for device in devices):
        yield f"devices = {devices!r} must be a list of numbers, none negative"
    elif len(set(devices)) < len(devices) or len(devices) != engines * tensor_parallel_size:
        yield (
            f"devices = {devices} must name {engines * tensor_parallel_size} different ones, {tensor_parallel_size} "
            f"for each of {engines} engines"
        )


class AgentsMissing(MegatronRLError):
    """Agents that a scheduler was to start do not answer."""

    exit_code = ExitCode.RUN


@dataclasses.dataclass(frozen=True)
class AlikeHosts(Generic[T]):
    """The content of a FILE that describes all hosts by one table."""

    which: T
    """The table of the kind."""
    every: HostPlace
    port: int
    token: str
    tls_ca: Path | None
    hosts_per_engine: int
    """The number of hosts in a row that run each of their engines together."""

    def place(self, addresses: Sequence[str]) -> HostList:
        size = self.hosts_per_engine
        if len(addresses) % size:
            raise UsageError(
                f"{FLAG}: {_HOSTS_PER_ENGINE} = {size} must divide the number of hosts, {len(addresses)}: start others"
            )
        places = tuple(
            dataclasses.replace(self.every, address=address, together=f"engines-{number // size}" if size > 1 else "")
            for number, address in enumerate(addresses)
        )
        return HostList(places, self.token, self.tls_ca)


def read_alike(text: str, table: type[T], tensor_parallel_size: int, problems: Sequence[str] = ()) -> AlikeHosts[T]:
    """Read the FILE of a value of the flag; `table` has a field for each key of the kind's own table.

    A UsageError has all mistakes, and these problems.
    """
    kind, _ = split_value(text)
    content, token, tls_ca = _read_file(
        text, lambda content: _check_alike(content, kind, table, tensor_parallel_size), problems
    )
    every = dict(content.get(_EVERY, {}))
    port, size = every.pop("port", DEFAULT_PORT), every.pop(_HOSTS_PER_ENGINE, 1)
    place = _make_place({**every, "address": ""})
    return AlikeHosts(table(**content.get(kind, {})), place, port, token, tls_ca, size)


class _NamedHosts(Protocol):
    def list_names(self) -> list[str]: ...


@dataclasses.dataclass(frozen=True)
class SlurmHosts:
    """The hosts of a component of the het-job that the sidecar belongs to."""

    het_group: int = 1

    def list_names(self) -> list[str]:
        variable = f"SLURM_JOB_NODELIST_HET_GROUP_{self.het_group}"
        nodes = os.environ.get(variable)
        if nodes is None:
            raise UsageError(
                f"{FLAG} slurm: {variable} is not set: start the run in a het-job whose component {self.het_group} has "
                f"the agents (megatron-rl launch slurm), or write {FLAG} static:FILE"
            )
        if shutil.which("scontrol") is None:
            raise UsageError(f"{FLAG} slurm: scontrol, which lists the hosts in {nodes}, is not found: install it")
        listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False)
        if listed.returncode:
            raise UsageError(f"{FLAG} slurm: scontrol cannot list the hosts in {nodes}: {listed.stderr.strip()}")
        return listed.stdout.split()


@dataclasses.dataclass(frozen=True)
class KubernetesHosts:
    """The pods of a StatefulSet, by the names that its headless Service gives them.

    A pod that is started again has another address and the same name.
    """

    stateful_set: str
    service: str
    replicas: int

    def list_names(self) -> list[str]:
        return [f"{self.stateful_set}-{number}.{self.service}" for number in range(self.replicas)]


class _ScheduledSource:
    """Hosts whose names a scheduler knows. FILE is read again while the run follows it."""

    def __init__(self, table: type[_NamedHosts], text: str, tensor_parallel_size: int) -> None:
        self._table = table
        self._text = text
        self._size = tensor_parallel_size
        self._read_file()

    @contextlib.asynccontextmanager
    async def opened(self, seconds: float) -> AsyncIterator[Callable[[], HostList]]:
        await await_agents(self._read(), seconds)
        yield self._read

    def _read_file(self) -> AlikeHosts[_NamedHosts]:
        return read_alike(self._text, self._table, self._size)

    def _read(self) -> HostList:
        described = self._read_file()
        return described.place([f"{name}:{described.port}" for name in described.which.list_names()])


SlurmSource = functools.partial(_ScheduledSource, SlurmHosts)
KubernetesSource = functools.partial(_ScheduledSource, KubernetesHosts)


def _check_alike(content: dict[str, Any], kind: str, table: type[Any], tensor_parallel_size: int) -> Iterator[str]:
    known = (*_ACCESS_KEYS, _EVERY, kind)
    for key in sorted(content.keys() - set(known)):
        yield f"unknown key {key!r}{suggest_nearest(key, known)}"
    every, of_kind = content.get(_EVERY, {}), content.get(kind, {})
    if not isinstance(every, dict) or not isinstance(of_kind, dict):
        yield f"{_EVERY} and {kind} must be tables: write [{_EVERY}] and [{kind}]"
        return
    port = every.get("port", DEFAULT_PORT)
    if not _is_count(port) or port > 65534:
        yield f"[{_EVERY}]: port = {port!r} must be a port of at most 65534: agents take weights at the one after it"
    for key in ("address", "together"):
        if key in every:
            yield f"[{_EVERY}]: {key} must not be given: hosts of {kind} are found, and {_HOSTS_PER_ENGINE} groups them"
    size = every.get(_HOSTS_PER_ENGINE, 1)
    if not _is_count(size) or tensor_parallel_size % size:
        yield (
            f"[{_EVERY}]: {_HOSTS_PER_ENGINE} = {size!r} must divide --rollout-tensor-parallel-size "
            f"{tensor_parallel_size}"
        )
        return
    alike = {key: value for key, value in every.items() if key not in ("port", _HOSTS_PER_ENGINE)}
    of_host = _check_host({**alike, "address": "host:1"}, tensor_parallel_size // size)
    yield from (f"[{_EVERY}]: {problem}" for problem in of_host)
    yield from (f"[{kind}]: {problem}" for problem in _check_fields(of_kind, table))


def _check_fields(values: dict[str, Any], table: type[Any]) -> Iterator[str]:
    fields = {field.name: field for field in dataclasses.fields(table)}
    for key in sorted(values.keys() - fields.keys()):
        yield f"unknown key {key!r}{suggest_nearest(key, fields)}"
    for name, field in fields.items():
        value = values.get(name, field.default)
        if value is dataclasses.MISSING:
            yield f"{name} is missing"
        elif field.type is int and not _is_count(value):
            yield f"{name} = {value!r} must be a number of at least 1"
        elif field.type is str and not (isinstance(value, str) and value):
            yield f"{name} = {value!r} must be a name"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


async def await_agents(hosts: HostList, seconds: float) -> None:
    tls = None if hosts.tls_ca is None else ssl.create_default_context(cafile=hosts.tls_ca)
    begun = said = time.monotonic()
    silent = {place.address: "" for place in hosts.hosts}
    # A proxy of the environment is not asked for the run's hosts.
    async with httpx.AsyncClient(verify=tls or False, timeout=_ANSWER_SECONDS, trust_env=False) as client:

        async def ask(address: str) -> str:
            try:
                answer = await client.get(f"{'https' if tls else 'http'}://{address}/health")
            except httpx.HTTPError as error:
                return str(error) or repr(error)
            return "" if answer.is_success else f"it answers {answer.status_code}"

        while True:
            found = await asyncio.gather(*map(ask, silent))
            silent = {address: error for address, error in zip(silent, found, strict=True) if error}
            if not silent:
                return
            waited = time.monotonic() - begun
            named = ", ".join(f"{address} ({error})" for address, error in silent.items())
            if waited > seconds:
                raise AgentsMissing(
                    f"{len(silent)} of {len(hosts.hosts)} agents do not answer after {waited:.0f} s: {named}: see what "
                    "they have printed, or raise --rollout-start-minutes"
                )
            if time.monotonic() - said > _NEWS_SECONDS:
                said = time.monotonic()
                _log.info(
                    "waiting for %d of %d agents, %.0f s so far: %s", len(silent), len(hosts.hosts), waited, named
                )
            await asyncio.sleep(_PAUSE_SECONDS)
