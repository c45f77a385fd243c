"""The service with its real records: an iteration, a kill in the middle of one, and the audit over both."""

import asyncio
import re
import shutil
from pathlib import Path

import msgspec
import pytest

from megatron_rl.cli import main as megatron_rl
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.records.audit_check import verify
from megatron_rl.sidecar.iteration import IterationFailed
from megatron_rl.sidecar.recorder import RunRecorder
from megatron_rl.sidecar.service import RolloutService
from megatron_rl.sidecar.vllm.engine import VllmEngine
from tests.sidecar.scripted_service import Engines, RewardLength, engine, submission, weights
from tests.sidecar.vllm_models import Models, in_shared_memory

PLACES = [(replica, index) for replica in range(2) for index in range(2)]


def test_groups_finished_before_a_kill_are_not_sampled_again_and_slots_stay_the_same(tmp_path: Path) -> None:
    before: dict[tuple[int, int], bytes] = {}

    async def killed() -> None:
        recorder = RunRecorder(tmp_path, "run")
        service = RolloutService(Engines(engine("0", group_faults={"run-0-7": "hang"})), RewardLength(), recorder)
        await service.take_lease("run")
        await service.publish(weights())
        await service.submit(submission())
        before[0, 0] = await service.slot(0, 0, 0, 10) or b""
        while service.counters.groups < 7:
            await asyncio.sleep(0.005)
        # As a kill would: no part is ended, and the kernel closes the files.
        assert service._task is not None
        service._task.cancel()
        recorder.close()

    async def successor() -> RolloutService:
        last = engine("0")
        recorder = RunRecorder(tmp_path, "run")
        service = RolloutService(Engines(last), RewardLength(), recorder)
        await service.take_lease("run")
        await service.publish(weights())
        await service.submit(submission())
        slots = {place: await service.slot(0, *place, 10) for place in PLACES}
        assert slots[0, 0] == before[0, 0]
        assert last.num_served == 1
        service.complete(0)
        await service.close()
        recorder.close()
        prompts = [part.prompt_index for data in slots.values() for part in wire.decode(data or b"", wire.Slot).parts]
        assert sorted(prompts) == list(range(8))
        return service

    asyncio.run(killed())
    service = asyncio.run(successor())
    assert service.counters.reused == 7


def test_an_iteration_submitted_with_other_weights_samples_everything_again(tmp_path: Path) -> None:
    async def run(version_of_weights: int, expected: int) -> None:
        recorder = RunRecorder(tmp_path, "run")
        last = engine("0")
        service = RolloutService(Engines(last), RewardLength(), recorder)
        await service.take_lease("run")
        held = wire.Weights(
            run="run",
            version=0,
            fingerprint=f"weights-{version_of_weights}",
            source=wire.FileSource(folder=""),
            dtype="float32",
        )
        await service.publish(held)
        await service.submit(msgspec.structs.replace(submission(), fingerprint=held.fingerprint))
        for place in PLACES:
            assert await service.slot(0, *place, 10)
        assert last.num_served == expected
        await service.close()
        recorder.close()

    asyncio.run(run(0, 8))
    asyncio.run(run(0, 0))
    asyncio.run(run(1, 8))


def test_an_iteration_submitted_to_other_rewards_samples_everything_again(tmp_path: Path) -> None:
    async def run(scoring: str, expected: int) -> None:
        recorder = RunRecorder(tmp_path, "run", scoring=scoring)
        last = engine("0")
        service = RolloutService(Engines(last), RewardLength(), recorder)
        await service.take_lease("run")
        await service.publish(weights())
        await service.submit(submission())
        for place in PLACES:
            assert await service.slot(0, *place, 10)
        assert last.num_served == expected
        await service.close()
        recorder.close()

    asyncio.run(run("length", 8))
    asyncio.run(run("length=2", 8))
    asyncio.run(run("length=2", 0))
    assert verify(tmp_path / "audit.jsonl").breaches == []


def test_an_engine_may_join_after_the_publish(tmp_path: Path) -> None:
    async def run() -> None:
        recorder = RunRecorder(tmp_path, "run")
        engines = Engines(engine("0"))
        service = RolloutService(engines, RewardLength(), recorder)
        await service.take_lease("run")
        await service.publish(weights())
        late = Engines(engine("1"))
        await late.publish(weights())
        engines.engines = (*engines.engines, *late.engines)
        await service.submit(submission())
        for place in PLACES:
            assert await service.slot(0, *place, 10)
        service.complete(0)
        assert late.engines[0].num_served > 0
        await service.close()
        recorder.close()

    asyncio.run(run())
    assert verify(tmp_path / "audit.jsonl").breaches == []


def test_a_run_whose_records_another_process_holds_is_refused(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, "run")
    with pytest.raises(Exception, match=r"lock|open|held"):
        RunRecorder(tmp_path, "run")
    recorder.close()


def test_a_failed_iteration_is_in_the_log(tmp_path: Path) -> None:
    async def run() -> None:
        recorder = RunRecorder(tmp_path, "run")
        faults = {f"run-0-{i}": "die" for i in range(8)}
        service = RolloutService(Engines(engine("0", group_faults=faults)), RewardLength(), recorder)
        await service.take_lease("run")
        await service.publish(weights())
        await service.submit(submission())
        with pytest.raises(IterationFailed):
            await service.slot(0, 0, 0, 10)
        await service.close()
        recorder.close()

    asyncio.run(run())
    assert '"event":"fail"' in (tmp_path / "audit.jsonl").read_text()


def test_log_probs_of_vllm_can_be_computed_again_from_the_checkpoint_of_their_version(
    tmp_path: Path, engine: VllmEngine, models: Models, run, capsys
) -> None:
    async def iteration(held: wire.Weights, recorder: RunRecorder) -> None:
        service = RolloutService(Engines(engine), RewardLength(), recorder)
        await service.take_lease("test")
        await service.publish(held)
        asked = submission(held.version)
        sampling = wire.Sampling(max_tokens=24, temperature=0.7)
        await service.submit(
            msgspec.structs.replace(asked, run="test", fingerprint=held.fingerprint, sampling=sampling)
        )
        for place in PLACES:
            assert await service.slot(held.version, *place, 60)
        service.complete(held.version)
        await service.close()

    recorder = RunRecorder(tmp_path / "test", "test")
    for version, model in ((81, models.second), (82, models.first)):
        with in_shared_memory(model, version) as held:
            run(iteration(held, recorder))
        shutil.copytree(model, tmp_path / "checkpoints" / f"iter_{version:07d}")
    recorder.close()
    words = ["audit", str(tmp_path / "test"), "--rescore", "32", "--checkpoints", str(tmp_path / "checkpoints")]
    assert megatron_rl(words) == 0
    output = capsys.readouterr().out
    assert "32 responses of 2 versions computed again, 0 breaches" in output
    for version in (81, 82):
        numbers = re.search(rf"^ +{version} +16 +\d+ +(\S+) +(\S+) +0.001$", output, re.MULTILINE)
        assert numbers is not None, output
        assert float(numbers[2]) < float(numbers[1]) < 1e-4
