"""Real Megatron ranks offer their memory to a real vLLM, which copies from it and is proven to hold the weights."""

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

from megatron_rl.platforms.cpu import CpuPlatform
from megatron_rl.shared.protocol.wire import PublishAnswer, Weights
from megatron_rl.sidecar.launcher import LocalLauncher
from megatron_rl.sidecar.vllm.engine import VllmEngine
from megatron_rl.sidecar.vllm.factory import VllmFactory
from megatron_rl.sidecar.vllm.server import run_folder
from megatron_rl.trainer.mcore.publish.shared_memory import SharedMemoryPublisher
from tests.distributed.layouts import CASES, build, start_session
from tests.offers import HostSharing
from tests.ranks import ROOT, run_ranks
from tests.sidecar import vllm_models
from tests.sidecar.conftest import Run, _kernels, run
from tests.sidecar.vllm_models import publish

__all__ = ["run"]

pytestmark = pytest.mark.each_change

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


def offer(case: str, model: Path, folder: Path, mail: Path) -> int:
    """Publish some versions that engines must copy from the ranks' memory; return the number of storages shared."""
    sharing = HostSharing()
    with start_session(CASES[case]) as session, mock.patch.object(CpuPlatform, "device_sharing", return_value=sharing):
        weights = build(session, CASES[case], model).weights
        receiver = Mail(mail) if session.rank == 0 else None
        publisher = SharedMemoryPublisher(weights, session, receiver, "run", folder / "run", through="ipc")
        for version in range(NUM_VERSIONS):
            publisher.publish(version)
            with torch.no_grad():
                for shard in weights.shards:
                    shard.parameter.mul_(1.02)
        publisher.close()
    return sharing.num_shared


@pytest.fixture
def engine(run: Run, model: Path) -> Iterator[VllmEngine]:
    config = dataclasses.replace(
        vllm_models.CONFIG,
        model=str(model),
        flags=(*vllm_models.CONFIG.flags, "--worker-extension-cls", "tests.sidecar.in_place_extension.Extension"),
        environment={"PYTHONPATH": str(ROOT), **_kernels()},
    )
    folder = run_folder()
    made = VllmFactory(config, folder, LocalLauncher()).create("engine-0")
    try:
        run(made.start())
        yield made
    finally:
        run(made.close())
        shutil.rmtree(folder)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return vllm_models.draw("qwen3", tmp_path / "model").first


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="megatron-rl-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.timeout(600)
def test_vllm_holds_what_two_tensor_parallel_ranks_of_megatron_offer_version_after_version(
    run: Run, engine: VllmEngine, model: Path, tmp_path: Path, memory: Path
) -> None:
    mail = Mail(tmp_path)
    probes = []
    with ThreadPoolExecutor(1) as pool:
        ranks = pool.submit(run_ranks, offer, 2, "TP2", model, memory, tmp_path)
        for version in range(NUM_VERSIONS):
            weights = mail.receive(f"weights-{version}", Weights, ranks)
            try:
                probes.append(run(publish(engine, weights)))
                report = run(load(engine, weights))
            except Exception as error:
                mail.send(f"answer-{version}", PublishAnswer(reasons=(str(error),)))
                raise
            assert (report.through, report.reasons) == ("ipc", ())
            assert report.num_compared == report.num_parameters > 0
            mail.send(f"answer-{version}", PublishAnswer(through=report.through))
        assert all(num_shared > 0 for num_shared in ranks.result())
    assert len({tuple(log_probs) for log_probs in probes}) == NUM_VERSIONS


async def load(engine: VllmEngine, weights: Weights) -> Any:
    await engine.pause()
    return await engine.load(weights)
