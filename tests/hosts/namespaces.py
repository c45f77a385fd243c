"""Hosts as network namespaces of this machine, on a bridge, each with an address and a link of its own.

Files are shared: a test gives each host folders of its own.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

OWN_ADDRESS = "10.77.0.1"
"""The address at which hosts reach the test's own process."""
_PREFIX = 16


class Host:
    """One namespace."""

    def __init__(self, namespace: str, address: str, link: str) -> None:
        self.namespace = namespace
        self.address = address
        self._link = link
        """The end of its link at the bridge."""

    def popen(self, words: Sequence[str], **arguments: Any) -> "subprocess.Popen[bytes]":
        """Start a process on this host; its number is that of the process itself."""
        return subprocess.Popen(["ip", "netns", "exec", self.namespace, *words], **arguments)

    def set_link(self, is_up: bool) -> None:
        """Cut the link, or mend it."""
        _call("ip", "link", "set", self._link, "up" if is_up else "down")

    def shape(self, rule: str) -> None:
        """Shape both directions by a rule of tc, "tbf rate 1mbit burst 32kbit latency 1s"; an empty one ends that."""
        for words in (["-n", self.namespace, "qdisc"], ["qdisc"]):
            device = "eth0" if "-n" in words else self._link
            subprocess.run(["tc", *words, "del", "dev", device, "root"], stderr=subprocess.DEVNULL, check=False)
            if rule:
                _call("tc", *words, "add", "dev", device, "root", *rule.split())

    def count_bytes(self) -> tuple[int, int]:
        """Return the bytes that it has received and sent over its link, by the kernel's account."""
        counts = Path("/sys/class/net", self._link, "statistics")
        # Seen from the bridge.
        return int((counts / "tx_bytes").read_text()), int((counts / "rx_bytes").read_text())


@contextlib.contextmanager
def network(num_hosts: int) -> Iterator[list[Host]]:
    """Make hosts on a bridge, and remove them; skip the test where that is not possible."""
    if reason := _find_obstacle():
        pytest.skip(reason)
    bridge = f"mrl{os.getpid()}b"
    names = [f"mrl{os.getpid()}h{number}" for number in range(num_hosts)]
    try:
        _call("ip", "link", "add", bridge, "type", "bridge")
        _call("ip", "address", "add", f"{OWN_ADDRESS}/{_PREFIX}", "dev", bridge)
        _call("ip", "link", "set", bridge, "up")
        yield [_make_host(name, f"10.77.1.{number}", bridge) for number, name in enumerate(names, 1)]
    finally:
        for name in names:
            _call("ip", "link", "delete", name, check=False)
            _call("ip", "netns", "delete", name, check=False)
        _call("ip", "link", "delete", bridge, check=False)


def _make_host(name: str, address: str, bridge: str) -> Host:
    _call("ip", "netns", "add", name)
    _call("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
    _call("ip", "link", "set", name, "master", bridge, "up")
    _call("ip", "-n", name, "address", "add", f"{address}/{_PREFIX}", "dev", "eth0")
    for device in ("lo", "eth0"):
        _call("ip", "-n", name, "link", "set", device, "up")
    return Host(name, address, name)


def _find_obstacle() -> str | None:
    """Say why no namespaces can be made here."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"namespaces need {' and '.join(missing)} of iproute2"
    if os.geteuid() != 0:
        return "namespaces need root"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return f"this kernel makes no namespaces: {tried.stderr.strip()}" if tried.returncode else None


def _call(*words: str, check: bool = True) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
