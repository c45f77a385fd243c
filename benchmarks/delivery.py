"""Measure the delivery of weights to a host over TCP, on loopback, beside a plain copy and beside bare sockets.

All go from files in memory to files in memory. Bare sockets neither compute codes nor answer: they show what the
system's TCP does between two processes. The delivery computes codes of all bytes on both sides, on the same cores.
"""

import argparse
import contextlib
import functools
import mmap
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks import report
from megatron_rl.shared.weights.delivery.channel import Shipment
from megatron_rl.shared.weights.delivery.control import Control
from megatron_rl.shared.weights.delivery.mapped import MappedFiles
from megatron_rl.shared.weights.delivery.messages import Contents, File, Hello, Portion, Strip, Target
from megatron_rl.shared.weights.delivery.sender import HostSender, Supply

HEADER = bytes(64)
TOKEN = "a token"
SECONDS = 300.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="only see that it runs")
    is_tiny = parser.parse_args(arguments).tiny
    num_bytes, portion_bytes = (1 << 22, 1 << 20) if is_tiny else (1 << 30, 1 << 24)
    rounds, all_streams = (1, (1,)) if is_tiny else (5, (1, 2, 4))
    rates: dict[str, list[float]] = {}

    def note(name: str, action: Callable[[], None]) -> None:
        begun = time.perf_counter()
        action()
        rates.setdefault(name, []).append(num_bytes / 1e9 / (time.perf_counter() - begun))

    with tempfile.TemporaryDirectory(prefix="megatron-rl-delivery-", dir="/dev/shm") as memory:
        source, host = Path(memory, "source"), Path(memory, "host")
        for folder in (source, host):
            folder.mkdir(mode=0o700)
        (source / "model.safetensors").write_bytes(HEADER + bytes(range(256)) * (num_bytes // 256))
        contents = _describe(num_bytes, portion_bytes)
        with _Receiver(host) as port:
            version = 0
            for _ in range(rounds + 2):
                note("cp", functools.partial(_copy, source, Path(memory, "copy")))
                for streams in all_streams:
                    with _open_raw(source, Path(memory, "raw"), streams) as send:
                        note(f"sockets, {streams} streams", send)
                    version += 1
                    ours = functools.partial(_deliver, source, contents, port, version, streams)
                    note(f"delivery, {streams} streams", ours)
    # The first two rounds find memory that the others reuse.
    figures = {name: found[min(2, len(found) - 1) :] for name, found in rates.items()}
    report.table(f"{num_bytes / 1e9:.2f} GB from memory to memory", figures, "GB/s")
    medians = {name: sorted(found)[len(found) // 2] for name, found in figures.items()}
    most = all_streams[-1]
    report.finish(
        {f"gb_s_{streams}": medians[f"delivery, {streams} streams"] for streams in all_streams}
        | {
            "vs_sockets": medians[f"delivery, {most} streams"] / medians[f"sockets, {most} streams"],
            "vs_copy": medians[f"delivery, {most} streams"] / medians["cp"],
        }
    )


def _describe(num_bytes: int, portion_bytes: int) -> Contents:
    portions = [
        Portion(0, 0, (Strip(len(HEADER) + start, 1, portion_bytes, portion_bytes),), ((0, portion_bytes),))
        for start in range(0, num_bytes, portion_bytes)
    ]
    return Contents((File("model.safetensors", len(HEADER) + num_bytes, HEADER),), ("weight",), 1, tuple(portions))


def _deliver(source: Path, contents: Contents, port: int, version: int, streams: int) -> None:
    target, hello = Target("host", "127.0.0.1", port), Hello("control", "benchmark", 1, version, "none", "rank 0")
    shipment = Shipment(hello, TOKEN.encode(), contents, streams, SECONDS)
    control = Control([target], shipment, b"{}")
    control.await_begun()
    supply = Supply(contents)
    HostSender(target, shipment, MappedFiles(source, contents.files), supply)
    supply.add(supply.numbers)
    assert control.await_round(SECONDS)
    assert not control.list_lost()
    control.close()


class _Receiver:
    """A process that receives versions in a folder."""

    def __init__(self, folder: Path):
        words = [sys.executable, "-m", "tests.hosts.receiver", str(folder), "127.0.0.1"]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{TOKEN}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _copy(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    shutil.copyfile(source / "model.safetensors", target / "model.safetensors")


def take_raw(size: int, streams: int, path: str) -> None:
    """Write what comes over bare sockets into a mapped file, each stream its part."""
    Path(path).touch()
    os.truncate(path, size)
    with open(path, "r+b") as file:
        memory = memoryview(mmap.mmap(file.fileno(), size))
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)

    def take() -> None:
        connection, _ = listener.accept()
        number, part = connection.recv(1)[0], size // streams
        target = memory[number * part : (number + 1) * part]
        while target:
            target = target[connection.recv_into(target, min(len(target), 1 << 20)) :]
        connection.sendall(b"x")

    _run_all([take] * streams)


def _run_all(actions: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def _open_raw(source: Path, target: Path, streams: int) -> Iterator[Callable[[], None]]:
    """Yield a function that sends a file over bare sockets to a process that writes it into a mapped file."""
    target.mkdir(exist_ok=True)
    path = source / "model.safetensors"
    size = path.stat().st_size - len(HEADER)
    code = f"from benchmarks.delivery import take_raw; take_raw({size}, {streams}, {str(target / 'raw')!r})"
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process, open(path, "rb") as file:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        memory = memoryview(mmap.mmap(file.fileno(), len(HEADER) + size, access=mmap.ACCESS_READ))[len(HEADER) :]

        def send(number: int) -> None:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(bytes([number]))
                part = size // streams
                for start in range(number * part, (number + 1) * part, 1 << 20):
                    connection.sendall(memory[start : min(start + (1 << 20), (number + 1) * part)])
                connection.recv(1)

        yield lambda: _run_all([functools.partial(send, number) for number in range(streams)])


if __name__ == "__main__":
    main()
