"""The service with its real records: an iteration, a kill in the middle of one, and the audit over both."""

import asyncio
import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from megatron_rl.cli import main as megatron_rl
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.records.audit_check import verify
from megatron_rl.sidecar.engines.scripted import ScriptedEngine
from megatron_rl.sidecar.iteration import IterationFailed
from megatron_rl.sidecar.recorder import RunRecorder
from megatron_rl.sidecar.service import RolloutService
from megatron_rl.sidecar.vllm.engine import VllmEngine
from tests.sidecar.scripted_service import Engines, RewardLength, engine, serving, submission, weights
from tests.sidecar.vllm_models import Models, in_shared_memory

PLACES = [(replica, index) for replica in range(2) for index in range(2)]


@contextlib.asynccontextmanager
async def recording(
    folder: Path, *engines: ScriptedEngine, scoring: str = ""
) -> AsyncIterator[tuple[RolloutService, RunRecorder]]:
    """Start a service that records what it does in this folder."""
    with contextlib.closing(RunRecorder(folder, "run", scoring=scoring)) as recorder:
        async with serving(*engines, memory=recorder) as service:
            yield service, recorder


async def test_groups_finished_before_a_kill_are_not_sampled_again_and_slots_stay_the_same(tmp_path: Path) -> None:
    async with recording(tmp_path, engine("0", group_faults={"run-0-7": "hang"})) as (service, recorder):
        await service.submit(submission())
        before = await service.slot(0, 0, 0, 10)
        while service.counters.groups < 7:
            await asyncio.sleep(0.005)
        # As a kill would: no part is ended, and the kernel closes the files.
        assert service._task is not None
        service._task.cancel()
        recorder.close()
    last = engine("0")
    async with recording(tmp_path, last) as (service, _):
        await service.submit(submission())
        slots = {place: await service.slot(0, *place, 10) for place in PLACES}
        assert slots[0, 0] == before
        assert last.num_served == 1
        service.complete(0)
    prompts = [part.prompt_index for data in slots.values() for part in wire.decode(data or b"", wire.Slot).parts]
    assert sorted(prompts) == list(range(8))
    assert service.counters.reused == 7


@pytest.mark.parametrize(
    "attempts",
    [
        [("weights-0", "", 8), ("weights-0", "", 0), ("weights-1", "", 8)],
        [("weights-0", "length", 8), ("weights-0", "length=2", 8), ("weights-0", "length=2", 0)],
    ],
    ids=["other weights", "other rewards"],
)
async def test_an_iteration_submitted_with_others_samples_everything_again(tmp_path: Path, attempts) -> None:
    for fingerprint, scoring, num_sampled in attempts:
        last = engine("0")
        async with recording(tmp_path, last, scoring=scoring) as (service, _):
            await service.publish(msgspec.structs.replace(weights(), fingerprint=fingerprint))
            await service.submit(msgspec.structs.replace(submission(), fingerprint=fingerprint))
            for place in PLACES:
                assert await service.slot(0, *place, 10)
            assert last.num_served == num_sampled
    assert verify(tmp_path / "audit.jsonl").breaches == []


async def test_an_engine_may_join_after_the_publish(tmp_path: Path) -> None:
    async with recording(tmp_path) as (service, _):
        late = Engines(engine("1"))
        await late.publish(weights())
        service.engines.engines = (*service.engines.engines, *late.engines)
        await service.submit(submission())
        for place in PLACES:
            assert await service.slot(0, *place, 10)
        service.complete(0)
        assert late.engines[0].num_served > 0
    assert verify(tmp_path / "audit.jsonl").breaches == []


def test_a_run_whose_records_another_process_holds_is_refused(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, "run")
    with pytest.raises(Exception, match=r"lock|open|held"):
        RunRecorder(tmp_path, "run")
    recorder.close()


def test_an_objective_is_recorded_when_it_changes_and_plug_ins_whenever_they_are_reported(tmp_path: Path) -> None:
    mismatch = wire.Mismatch(mean=0.0, largest=0.0, bound=None)
    with contextlib.closing(RunRecorder(tmp_path, "run")) as recorder:
        for version, beta in enumerate(("0.1", "0.1", "0.2")):
            aim, plug_ins = {"--grpo-kl-beta": beta}, {"--grpo-loss own.py:f": "0" * 64}
            recorder.trained(
                version, wire.Trained(version=version, mismatch=mismatch, plug_ins=plug_ins, objective=aim)
            )
        recorder.trained(3, wire.Trained(version=3, mismatch=mismatch))
    events = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    found = {
        kind: [event["version"] for event in events if event["event"] == kind]
        for kind in ("mismatch", "plug_ins", "objective")
    }
    assert found == {"mismatch": [0, 1, 2, 3], "plug_ins": [0, 1, 2], "objective": [0, 2]}


async def test_a_failed_iteration_is_in_the_log(tmp_path: Path) -> None:
    async with recording(tmp_path, engine("0", group_faults={f"run-0-{i}": "die" for i in range(8)})) as (service, _):
        await service.submit(submission())
        with pytest.raises(IterationFailed):
            await service.slot(0, 0, 0, 10)
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
