"""The kinds of `--rollout-hosts`: `static:FILE`, and hosts whose agents a scheduler has started.

`slurm`, `kubernetes` and `ray` lead to addresses of agents, as a file of static hosts does. All their hosts are alike,
and FILE describes one of them. `megatron-rl launch` writes FILE, and names it in the environment of the run.
"""

import asyncio
import contextlib
import dataclasses
import importlib.util
import logging
import os
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import ExitCode, MegatronRLError, UsageError
from megatron_rl.flag import suggest_nearest
from megatron_rl.sidecar.hosts import static
from megatron_rl.sidecar.hosts.ray_cluster import RayCluster, RayHosts
from megatron_rl.sidecar.hosts.static import FLAG, HostPlace, StaticHosts

_log = logging.getLogger(__name__)

VARIABLE = "MEGATRON_RL_HOSTS"
"""The variable with the path of FILE, for a value of the flag that names none."""
DEFAULT_PORT = 7100
_RAY = "ray"
_EVERY = "every_host"
_TOGETHER = "hosts_per_engine"
_PAUSE_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
_NEWS_SECONDS = 30.0


class AgentsMissing(MegatronRLError):
    """Agents that a scheduler was to start do not answer."""

    exit_code = ExitCode.RUN


@dataclasses.dataclass(frozen=True)
class _Slurm:
    """The hosts of a component of the het-job that the sidecar belongs to."""

    het_group: int = 1

    def list_names(self) -> list[str]:
        """List the hosts' names."""
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
class _Kubernetes:
    """The pods of a StatefulSet, by the names that its headless Service gives them.

    A pod that is started again has another address and the same name.
    """

    stateful_set: str
    service: str
    replicas: int

    def list_names(self) -> list[str]:
        """List the pods' names."""
        return [f"{self.stateful_set}-{number}.{self.service}" for number in range(self.replicas)]


_KINDS: Mapping[str, type[_Slurm] | type[_Kubernetes] | type[RayHosts]] = {
    "slurm": _Slurm,
    "kubernetes": _Kubernetes,
    _RAY: RayHosts,
}
_VALUES = f"{static.KIND}:FILE, {', '.join(f'{kind}[:FILE]' for kind in _KINDS)}"


@dataclasses.dataclass(frozen=True)
class _Found:
    """The content of a file about hosts that a scheduler has started."""

    source: _Slurm | _Kubernetes | RayHosts
    every: HostPlace
    port: int
    token: str
    tls_ca: Path | None
    hosts_per_engine: int
    """The number of hosts in a row that run each of their engines together."""

    def place(self, addresses: Sequence[str]) -> StaticHosts:
        """Return the hosts with agents at these addresses."""
        size = self.hosts_per_engine
        if len(addresses) % size:
            raise UsageError(
                f"{FLAG}: {_TOGETHER} = {size} must divide the number of hosts, {len(addresses)}: start others"
            )
        places = tuple(
            dataclasses.replace(self.every, address=address, together=f"engines-{number // size}" if size > 1 else "")
            for number, address in enumerate(addresses)
        )
        return StaticHosts(places, self.token, self.tls_ca)


@dataclasses.dataclass(frozen=True)
class FoundHosts:
    """The hosts of a run, which may change while it runs."""

    read: Callable[[], StaticHosts]
    """Returns the hosts as they are now; a UsageError has the mistakes that a file has meanwhile."""


def find_problems(text: str, tensor_parallel_size: int) -> Iterator[str]:
    """Yield each mistake in a value of the flag and in the file that it names."""
    try:
        _read(text, tensor_parallel_size)
    except UsageError as error:
        yield from error.problems


async def find_hosts(
    text: str, tensor_parallel_size: int, seconds: float, stack: contextlib.AsyncExitStack
) -> FoundHosts:
    """Return the hosts of a value of the flag; those of a scheduler as soon as all their agents answer.

    They are waited for as long as `seconds` says. Agents that this starts are ended with the stack.
    """
    found = _read(text, tensor_parallel_size)
    if isinstance(found, StaticHosts):
        return FoundHosts(lambda: static.read_hosts(text, tensor_parallel_size))
    if isinstance(found.source, RayHosts):
        cluster = RayCluster(found.source, found.token, found.port, len(found.every.devices or ()))
        await stack.enter_async_context(cluster.opened(seconds))
        return FoundHosts(lambda: found.place(cluster.addresses))
    await _await_agents(_list_named(found), seconds)
    return FoundHosts(lambda: _list_named(_read(text, tensor_parallel_size)))


def _list_named(found: StaticHosts | _Found) -> StaticHosts:
    """Return the hosts whose names a scheduler knows."""
    assert isinstance(found, _Found)
    assert not isinstance(found.source, RayHosts)
    return found.place([f"{name}:{found.port}" for name in found.source.list_names()])


def find_secrets(text: str | None) -> tuple[Path, ...]:
    """Return the file of the agents' token, for a value of the flag that has been checked."""
    if text is None:
        return ()
    _, path = _split(text)
    return ((path.parent / static.read_toml(text, path)[static.TOKEN_FILE]).resolve(),)


def _split(text: str) -> tuple[str, Path]:
    """Split a value of the flag into its kind and its file."""
    kind, _, name = text.partition(":")
    return kind, Path(name or os.environ.get(VARIABLE, ""))


def _read(text: str, tensor_parallel_size: int) -> StaticHosts | _Found:
    kind, path = _split(text)
    if kind == static.KIND:
        return static.read_hosts(text, tensor_parallel_size)
    if kind not in _KINDS:
        raise UsageError(f"{FLAG} {text} must be one of {_VALUES}{suggest_nearest(kind, _KINDS)}")
    if not path.name:
        raise UsageError(
            f"{FLAG} {text} names no file, and {VARIABLE} is not set: start the run by megatron-rl launch {kind}, or "
            f"write {kind}:FILE"
        )
    content = static.read_toml(text, path)
    token, tls_ca, problems = static.read_access(content, path)
    own = content.get(kind, {})
    if kind == _RAY and importlib.util.find_spec(_RAY) is None:
        problems.append(f"{FLAG} {text}: ray is not installed: pip install 'megatron-rl[ray]'")
    problems += [f"{FLAG} {path}: {problem}" for problem in _check(content, kind, tensor_parallel_size)]
    if problems:
        raise UsageError(*problems)
    every = dict(content.get(_EVERY, {}))
    port, together = every.pop("port", DEFAULT_PORT), every.pop(_TOGETHER, 1)
    return _Found(_KINDS[kind](**own), static.make_place({**every, "address": ""}), port, token, tls_ca, together)


def _check(content: dict[str, Any], kind: str, tensor_parallel_size: int) -> Iterator[str]:
    known = (*static.OF_ACCESS, _EVERY, kind)
    for key in sorted(content.keys() - set(known)):
        yield f"unknown key {key!r}{suggest_nearest(key, known)}"
    every, own = content.get(_EVERY, {}), content.get(kind, {})
    if not isinstance(every, dict) or not isinstance(own, dict):
        yield f"{_EVERY} and {kind} must be tables: write [{_EVERY}] and [{kind}]"
        return
    port = every.get("port", DEFAULT_PORT)
    if not _is_count(port) or port > 65534:
        yield f"[{_EVERY}]: port = {port!r} must be a port of at most 65534: agents take weights at the one after it"
    for key in ("address", "together"):
        if key in every:
            yield f"[{_EVERY}]: {key} must not be given: hosts of {kind} are found, and {_TOGETHER} groups them"
    together = every.get(_TOGETHER, 1)
    if not _is_count(together) or tensor_parallel_size % together:
        yield (
            f"[{_EVERY}]: {_TOGETHER} = {together!r} must divide --rollout-tensor-parallel-size {tensor_parallel_size}"
        )
        return
    alike = {key: value for key, value in every.items() if key not in ("port", _TOGETHER)}
    of_host = static.check_host({**alike, "address": "host:1"}, tensor_parallel_size // together)
    yield from (f"[{_EVERY}]: {problem}" for problem in of_host)
    yield from (f"[{kind}]: {problem}" for problem in _check_fields(own, _KINDS[kind]))


def _check_fields(table: dict[str, Any], kind: type[Any]) -> Iterator[str]:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in sorted(table.keys() - fields.keys()):
        yield f"unknown key {key!r}{suggest_nearest(key, fields)}"
    for name, field in fields.items():
        value = table.get(name, field.default)
        if value is dataclasses.MISSING:
            yield f"{name} is missing"
        elif field.type is int and not _is_count(value):
            yield f"{name} = {value!r} must be a number of at least 1"
        elif field.type is str and not (isinstance(value, str) and value):
            yield f"{name} = {value!r} must be a name"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


async def _await_agents(hosts: StaticHosts, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
    """Wait until the agents of all hosts answer."""
    # Imported here, as above.
    import httpx

    tls = None if hosts.tls_ca is None else ssl.create_default_context(cafile=hosts.tls_ca)
    begun = said = clock()
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
            waited = clock() - begun
            named = ", ".join(f"{address} ({error})" for address, error in silent.items())
            if waited > seconds:
                raise AgentsMissing(
                    f"{len(silent)} of {len(hosts.hosts)} agents do not answer after {waited:.0f} s: {named}: see what "
                    "they have printed, or raise --rollout-start-minutes"
                )
            if clock() - said > _NEWS_SECONDS:
                said = clock()
                _log.info(
                    "waiting for %d of %d agents, %.0f s so far: %s", len(silent), len(hosts.hosts), waited, named
                )
            await asyncio.sleep(_PAUSE_SECONDS)
