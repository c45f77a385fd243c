"""Where engines live: on the sidecar's own host, and on the hosts that `--rollout-hosts` names.

The value of the flag is KIND:FILE. FILE, in TOML, has the token of the hosts' agents and describes the hosts. With the
kind `static` it describes each of them. If a scheduler has started their agents, one table describes all of them. The
command `launch` writes such a FILE, and names it in the environment of the run.

A run on one host imports no other module of this folder.
"""

import dataclasses
import importlib
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.errors import UsageError
from megatron_rl.flag import suggest_nearest

FLAG = "--rollout-hosts"
VARIABLE = "MEGATRON_RL_HOSTS"
"""The variable with the path of FILE, for a value of the flag that names none."""
DEFAULT_PORT = 7100
TOKEN_FILE = "token_file"

STATIC = "static"
KINDS: Mapping[str, str] = {
    STATIC: "megatron_rl.sidecar.hosts.sources:StaticSource",
    "slurm": "megatron_rl.sidecar.hosts.sources:SlurmSource",
    "kubernetes": "megatron_rl.sidecar.hosts.sources:KubernetesSource",
    "ray": "megatron_rl.sidecar.hosts.ray_cluster:RaySource",
}
"""The module and the class of each kind. The class is called with the value of the flag and the engines' number of
devices, and raises a UsageError with all mistakes in FILE."""
_VALUES = ", ".join(f"{kind}:FILE" if kind == STATIC else f"{kind}[:FILE]" for kind in KINDS)


@dataclasses.dataclass(frozen=True)
class HostPlace:
    """A host that runs engines, as its user describes it."""

    address: str
    """The address of its agent, HOST:PORT. It is also the host's name."""
    engines: int = 1
    devices: tuple[int, ...] | None = None
    """The numbers of the engines' accelerators, in order; None lets each engine take vLLM's choice."""
    python: str = ""
    """The Python of the environment that has vLLM; the agent's own if empty."""
    model: str = ""
    """The folder of the checkpoint on this host; that of --hf-model if empty."""
    together: str = ""
    """The word that hosts have in common if each of their engines is divided over all of them; empty for none."""


@dataclasses.dataclass(frozen=True)
class HostList:
    """All hosts of a run, and the token of their agents."""

    hosts: tuple[HostPlace, ...]
    token: str
    tls_ca: Path | None = None
    """The certificates that those of the agents must be signed by; None for agents without TLS."""


class HostSource(Protocol):
    """The hosts that a value of the flag names."""

    def opened(self, seconds: float) -> AbstractAsyncContextManager[Callable[[], HostList]]:
        """Wait at most these seconds for the hosts' agents, or start them until the context ends.

        The context has the function that returns the hosts as they are now. It raises a UsageError if FILE has mistakes
        by then.
        """
        ...


def build_source(text: str, tensor_parallel_size: int) -> HostSource:
    """Read a value of the flag and its FILE; a UsageError has all mistakes."""
    kind, path = split_value(text)
    if kind not in KINDS:
        raise UsageError(f"{FLAG} {text} must be one of {_VALUES}{suggest_nearest(kind, KINDS)}")
    if not path.name and kind != STATIC:
        raise UsageError(
            f"{FLAG} {text} names no file, and {VARIABLE} is not set: start the run by megatron-rl launch {kind}, or "
            f"write {kind}:FILE"
        )
    module, _, name = KINDS[kind].partition(":")
    source: HostSource = getattr(importlib.import_module(module), name)(text, tensor_parallel_size)
    return source


def find_host_problems(text: str, tensor_parallel_size: int) -> Iterator[str]:
    """Yield each mistake in a value of the flag and in its FILE."""
    try:
        build_source(text, tensor_parallel_size)
    except UsageError as error:
        yield from error.problems


def find_secrets(text: str | None) -> tuple[Path, ...]:
    """Return the file of the agents' token, for a value of the flag that has been checked."""
    if text is None:
        return ()
    _, path = split_value(text)
    return ((path.parent / read_toml(text, path)[TOKEN_FILE]).resolve(),)


def split_value(text: str) -> tuple[str, Path]:
    """Split a value of the flag into its kind and its FILE."""
    kind, _, name = text.partition(":")
    return kind, Path(name or os.environ.get(VARIABLE, ""))


def read_toml(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{FLAG} {text} cannot be read: {error}") from None
