"""Hosts as network namespaces of this machine, on a bridge, each with an address and a link of its own.

Hosts share all files, unless a test gives each of them a folder. Then a host has a name, a /tmp and a /dev/shm of its
own, and its folder as /mnt. What hosts still share is what an image of them would have: programs and home folders.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.hosts.disorder import open_tap

OWN_ADDRESS = "10.77.0.1"
"""The address at which hosts reach the test's own process."""
INSIDE = Path("/mnt")
"""The folder of a host, as its own processes see it."""
_PREFIX = 16
_SEPARATE = """
hostname "$1"
mount --bind "$2" /mnt
exec 3< "$4"
mount -t tmpfs tmpfs /tmp
if ! [ -d "$4" ]; then mkdir -p "$4"; mount --no-canonicalize --bind /proc/self/fd/3 "$4"; fi
exec 3<&-
mount -t tmpfs tmpfs /dev/shm
echo "$3" > /tmp/hosts
mount --bind /tmp/hosts /etc/hosts
echo
cat
"""


class Host:
    """One namespace."""

    def __init__(self, namespace: str, address: str, link: str, bridge: str, folder: Path | None = None) -> None:
        """Make a host over a namespace; with a folder, it has files of its own."""
        self.namespace = namespace
        self.address = address
        self.folder = folder
        """The folder that its processes see as `INSIDE`."""
        self._link = link
        """The end of its link at the bridge."""
        self._bridge = bridge
        self._enter = ["ip", "netns", "exec", namespace]
        self._holder: subprocess.Popen[bytes] | None = None
        """The process that keeps the host's files apart while it runs."""
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.restart()

    def restart(self) -> None:
        """Begin with an empty memory, after `kill`; the folder is as it was."""
        assert self.folder is not None
        self.close()
        words = ["ip", "netns", "exec", self.namespace, "unshare", "--mount", "--uts", "sh", "-ec", _SEPARATE]
        words += ["sh", self.namespace, str(self.folder), f"127.0.0.1 localhost\n{self.address} {self.namespace}"]
        words.append(str(Path.cwd()))
        holder = self._holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"\n"
        target = ["--target", str(holder.pid)]
        self._enter = ["nsenter", *target, "--net", "--mount", "--uts", f"--wd={Path.cwd()}", "--"]
        self.set_link(True)

    def popen(self, words: Sequence[str], **arguments: Any) -> "subprocess.Popen[bytes]":
        """Start a process on this host; its number is that of the process itself."""
        return subprocess.Popen([*self._enter, *words], **arguments)

    def list_processes(self) -> list[psutil.Process]:
        """List the processes that run on this host."""
        words = ["ip", "netns", "pids", self.namespace]
        found = {int(word) for word in subprocess.run(words, capture_output=True, check=True).stdout.split()}
        own = set() if self._holder is None else {self._holder.pid}
        own |= {child.pid for pid in own for child in psutil.Process(pid).children()}
        return [psutil.Process(pid) for pid in found - own if psutil.pid_exists(pid)]

    def list_files(self, folder: str) -> list[str]:
        """List the files below a folder, as the host's processes see it."""
        words = [*self._enter, "find", folder, "-type", "f"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()

    def kill(self) -> None:
        """Kill all processes of this host at once, as a power cut does; what it had in memory is lost."""
        self.set_link(False)
        for process in self.list_processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def close(self) -> None:
        """End the process that keeps its files apart, and all that a failed test has left on the host."""
        if self._holder is not None:
            self.kill()
            self._holder.communicate()

    def set_link(self, is_up: bool) -> None:
        """Cut the link, or restore it."""
        _call("ip", "link", "set", self._link, "up" if is_up else "down")

    def shape(self, rule: str) -> None:
        """Shape both directions by a rule of tc, "tbf rate 1mbit burst 32kbit latency 1s"; an empty one ends that."""
        for words in (["-n", self.namespace, "qdisc"], ["qdisc"]):
            device = "eth0" if "-n" in words else self._link
            subprocess.run(["tc", *words, "del", "dev", device, "root"], stderr=subprocess.DEVNULL, check=False)
            if rule:
                _call("tc", *words, "add", "dev", device, "root", *rule.split())

    @contextlib.contextmanager
    def disordered(self) -> Iterator[Callable[[], tuple[int, int, int]]]:
        """Have a program carry its frames, which repeats some and delays others past those that follow them.

        Yield a function that ends the program; it returns the numbers of frames, of those repeated, and of those
        delayed. Afterwards the host has no link.
        """
        outside = f"{self._link}t"
        with open_tap(outside) as tap:
            for words in (["master", self._bridge], ["up"]):
                _call("ip", "link", "set", outside, *words)
            _call("ip", "link", "set", self._link, "down")
            words = [sys.executable, "-m", "tests.hosts.disorder", str(tap), f"{self.address}/{_PREFIX}"]
            carrier = self.popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[tap])
            assert carrier.stdout is not None
            assert carrier.stdout.readline() == b"\n"

            def end() -> tuple[int, int, int]:
                output, _ = carrier.communicate(timeout=60)
                frames, repeated, delayed = map(int, output.split())
                return frames, repeated, delayed

            try:
                yield end
            finally:
                carrier.kill()
                carrier.wait()

    def count_bytes(self) -> tuple[int, int]:
        """Return the bytes that it has received and sent over its link, by the kernel's account."""
        counts = Path("/sys/class/net", self._link, "statistics")
        # Seen from the bridge.
        return int((counts / "tx_bytes").read_text()), int((counts / "rx_bytes").read_text())


@contextlib.contextmanager
def network(num_hosts: int, folder: Path | None = None) -> Iterator[list[Host]]:
    """Make hosts on a bridge, and remove them; skip the test where that is not possible.

    With a folder each host has files of its own, and a folder in that one.
    """
    if reason := _find_obstacle():
        pytest.skip(reason)
    with _exclusive():
        _remove_what_killed_tests_left()
        yield from _make_network(num_hosts, folder)


@contextlib.contextmanager
def _exclusive() -> Iterator[None]:
    """Wait until no other process of this machine has such a network: all have the same addresses."""
    with Path(tempfile.gettempdir(), "megatron-rl-test-hosts.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_what_killed_tests_left() -> None:
    """Remove the links and namespaces of tests whose process has ended; they would answer at the hosts' addresses."""
    words = ["ip", "-json", "link", "show"]
    links = [link["ifname"] for link in json.loads(subprocess.run(words, capture_output=True, check=True).stdout)]
    words = ["ip", "netns", "list"]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    spaces = [line.split()[0] for line in listed]
    for kind, names in (("link", links), ("netns", spaces)):
        for name in names:
            match = re.match(r"mrl(\d+)[bh]", name)
            if match and not psutil.pid_exists(int(match[1])):
                _call("ip", kind, "delete", name, check=False)


def _make_network(num_hosts: int, folder: Path | None) -> Iterator[list[Host]]:
    bridge = f"mrl{os.getpid()}b"
    names = [f"mrl{os.getpid()}h{number}" for number in range(num_hosts)]
    hosts: list[Host] = []
    try:
        _call("ip", "link", "add", bridge, "type", "bridge")
        _call("ip", "address", "add", f"{OWN_ADDRESS}/{_PREFIX}", "dev", bridge)
        _call("ip", "link", "set", bridge, "up")
        for number, name in enumerate(names, 1):
            own = None if folder is None else folder / f"host-{number}"
            hosts.append(_make_host(name, f"10.77.1.{number}", bridge, own))
        yield hosts
    finally:
        for host in hosts:
            host.close()
        for name in names:
            _call("ip", "link", "delete", name, check=False)
            _call("ip", "netns", "delete", name, check=False)
        _call("ip", "link", "delete", bridge, check=False)


def _make_host(name: str, address: str, bridge: str, folder: Path | None) -> Host:
    _call("ip", "netns", "add", name)
    _call("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
    _call("ip", "link", "set", name, "master", bridge, "up")
    _call("ip", "-n", name, "address", "add", f"{address}/{_PREFIX}", "dev", "eth0")
    for device in ("lo", "eth0"):
        _call("ip", "-n", name, "link", "set", device, "up")
    return Host(name, address, name, bridge, folder)


def _find_obstacle() -> str | None:
    """Say why no namespaces can be made here."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"this host lacks {' and '.join(missing)} of iproute2"
    if os.geteuid() != 0:
        return "this user makes no namespaces: make test-hosts runs it as root"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return f"this kernel makes no namespaces: {tried.stderr.strip()}" if tried.returncode else None


def _call(*words: str, check: bool = True) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
