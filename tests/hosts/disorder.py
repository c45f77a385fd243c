"""A program that carries frames between two network devices of its own, repeats some, and delays others.

It is what `tc netem` does, where the kernel does not have that. It runs on a host, whose device it makes; the other one
is made before, on the side of the bridge. When its input ends, it prints what it did.
"""

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_DEVICE = "tap0"
_SET_NAME = 0x400454CA
_TAP_WITHOUT_HEADER = 0x1002
_MOST_BYTES = 1 << 16
REPEATED, DELAYED = 0.05, 0.1
"""The shares of frames."""
_MOST_SECONDS = 0.005
"""The longest delay: many frames follow in this time."""


@contextlib.contextmanager
def open_tap(name: str) -> Iterator[int]:
    """Make a device whose frames are read and written here, while the context lasts."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(device, _SET_NAME, struct.pack("16sH", name.encode(), _TAP_WITHOUT_HEADER))
        yield device
    finally:
        os.close(device)


class Disorder:
    """Carries frames between two devices."""

    def __init__(self, first: int, second: int, seed: int = 0) -> None:
        self._others = {first: second, second: first}
        self._random = random.Random(seed)
        self._waiting: list[tuple[float, int, int, bytes]] = []
        """Frames by the time at which they are sent; the number keeps the order of those with the same time."""
        self.num_frames = self.num_repeated = self.num_delayed = 0

    def run(self, end: int) -> None:
        """Carry frames until there is something to read at `end`."""
        while True:
            pause = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            ready, _, _ = select.select([*self._others, end], [], [], pause)
            if end in ready:
                return
            for device in ready:
                self._take(device)
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _, _, device, frame = heapq.heappop(self._waiting)
                _write(device, frame)

    def _take(self, device: int) -> None:
        other = self._others[device]
        with contextlib.suppress(BlockingIOError):
            while frame := os.read(device, _MOST_BYTES):
                self.num_frames += 1
                is_delayed = self._random.random() < DELAYED
                is_repeated = self._random.random() < REPEATED
                self.num_delayed += is_delayed
                self.num_repeated += is_repeated
                if not is_delayed:
                    _write(other, frame)
                for _ in range(is_delayed + is_repeated):
                    due = time.monotonic() + self._random.uniform(0, _MOST_SECONDS)
                    heapq.heappush(self._waiting, (due, self.num_frames, other, frame))


def _write(device: int, frame: bytes) -> None:
    # A network may lose a frame; TCP sends it again.
    with contextlib.suppress(BlockingIOError):
        os.write(device, frame)


if __name__ == "__main__":
    with open_tap(_DEVICE) as inside:
        # Hosts that know the address of the device continue to send to it, for up to a minute.
        hardware = Path("/sys/class/net/eth0/address").read_text().strip()
        for words in (
            ["link", "set", "eth0", "down"],
            ["link", "set", _DEVICE, "address", hardware],
            ["address", "add", sys.argv[2], "dev", _DEVICE],
        ):
            subprocess.run(["ip", *words], check=True)
        subprocess.run(["ip", "link", "set", _DEVICE, "up"], check=True)
        disorder = Disorder(int(sys.argv[1]), inside)
        print(flush=True)
        disorder.run(sys.stdin.fileno())
    print(disorder.num_frames, disorder.num_repeated, disorder.num_delayed)
