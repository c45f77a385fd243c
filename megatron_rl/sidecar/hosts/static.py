"""The hosts of `--rollout-hosts static:FILE`, whose agents run already. All mistakes in FILE are reported at once."""

import contextlib
import dataclasses
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_rl.errors import MegatronRLError, UsageError
from megatron_rl.flag import suggest_nearest
from megatron_rl.shared.protocol.client import read_token
from megatron_rl.shared.protocol.hosts import parse_place
from megatron_rl.sidecar.hosts import FLAG, STATIC, TOKEN_FILE, HostList, HostPlace, read_toml

_TLS_CA = "tls_ca"
ACCESS_KEYS = (TOKEN_FILE, _TLS_CA)
_TOGETHER = "together"


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
    path = Path(name)
    content = read_toml(text, path)
    token, tls_ca, problems = read_access(content, path)
    problems = [*(f"{FLAG} {path}: {problem}" for problem in _check_file(content, tensor_parallel_size)), *problems]
    if problems:
        raise UsageError(*problems)
    return HostList(tuple(make_place(entry) for entry in content["host"]), token, tls_ca)


def read_access(content: dict[str, Any], path: Path) -> tuple[str, Path | None, list[str]]:
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
    return token, tls_ca, [f"{FLAG} {path}: {problem}" for problem in problems]


def make_place(entry: dict[str, Any]) -> HostPlace:
    devices = entry.get("devices")
    return HostPlace(**{**entry, "devices": None if devices is None else tuple(devices)})


def _check_file(content: dict[str, Any], tensor_parallel_size: int) -> Iterator[str]:
    known = (*ACCESS_KEYS, "host")
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
        yield from (f"host {number} ({address}): {problem}" for problem in check_host(entry, size))
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


def check_host(entry: dict[str, Any], tensor_parallel_size: int) -> Iterator[str]:
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
