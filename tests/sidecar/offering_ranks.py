"""Megatron ranks that offer their memory to an engine of the test's own process."""

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch

from megatron_rl.platforms.cpu import CpuPlatform
from megatron_rl.shared.protocol.wire import PublishAnswer, Weights
from megatron_rl.trainer.mcore.publish.files import FilesTransport
from megatron_rl.trainer.mcore.publish.publisher import Publisher
from tests.distributed.layouts import CASES, build, start_session
from tests.offers import HostSharing

NUM_VERSIONS = 3


class Mail:
    """Messages between a rank and the test's own process, which has the engine: a file each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def send(self, name: str, message: msgspec.Struct) -> None:
        unfinished = self._folder / f"{name}.unfinished"
        unfinished.write_bytes(msgspec.msgpack.encode(message))
        unfinished.rename(self._folder / name)

    def receive(self, name: str, kind: type, of: Future[Any] | None = None) -> Any:
        """Wait for a message, or until the one who would send it has ended."""
        while not (self._folder / name).exists():
            if of is not None and of.done():
                raise AssertionError(f"the ranks ended before {name}: {of.result()}")
            time.sleep(0.01)
        return msgspec.msgpack.decode((self._folder / name).read_bytes(), type=kind)

    def publish(self, weights: Weights, deadline_seconds: float) -> PublishAnswer:
        self.send(f"weights-{weights.version}", weights)
        return self.receive(f"answer-{weights.version}", PublishAnswer)

    def probed(self, answer: Any) -> None:
        raise AssertionError("no probe was given")


def offer_versions(case: str, model: Path, folder: Path, mail: Path) -> int:
    """Publish some versions that engines must copy from the ranks' memory; return the number of storages shared."""
    sharing = HostSharing()
    with start_session(CASES[case]) as session, mock.patch.object(CpuPlatform, "device_sharing", return_value=sharing):
        weights = build(session, CASES[case], model).weights
        receiver = Mail(mail) if session.rank == 0 else None
        publisher = Publisher(weights, session, receiver, "run", FilesTransport(folder / "run", "ipc"))
        for version in range(NUM_VERSIONS):
            publisher.publish(version)
            with torch.no_grad():
                for shard in weights.shards:
                    shard.parameter.mul_(1.02)
        publisher.close()
    return sharing.num_shared
