"""Evaluations: held-out prompts on the engines, beside training and apart from it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from megatron_rl.errors import InputError
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.client import EvaluationLost, RolloutError
from megatron_rl.shared.protocol.provenance import derive_group_seed
from megatron_rl.shared.records.audit_check import verify
from megatron_rl.sidecar.engines import EngineState, GroupRequest
from megatron_rl.sidecar.engines.pool import EnginePool
from megatron_rl.sidecar.engines.scripted import ScriptedEngine
from megatron_rl.sidecar.evaluation import EvaluationFailed
from megatron_rl.sidecar.service import Conflict, RolloutService
from megatron_rl.sidecar.vllm.engine import VllmEngine
from tests.sidecar.scripted_service import (
    Engines,
    Memory,
    RewardLength,
    all_slots,
    engine,
    evaluation,
    serving,
    submission,
    trained,
    weights,
)  # fmt: skip
from tests.sidecar.test_http import started, started_server
from tests.sidecar.test_recorder import recording
from tests.sidecar.vllm_models import Models, Reference, in_shared_memory


def decoded(data: bytes | None) -> wire.Evaluated:
    assert data is not None
    return wire.decode(data, wire.Evaluated)


async def test_an_evaluation_scores_every_prompt_in_order_with_seeds_of_its_own() -> None:
    asked = evaluation(group_size=3, sampling=wire.Sampling(max_tokens=8, temperature=0.7))
    memory = Memory()
    async with serving(engine("0", delay=lambda r: 0.01 * (r.seed % 3)), engine("1"), memory=memory) as service:
        await service.evaluate(asked)
        answer = decoded(await service.evaluated(0, 10))
        assert (answer.run, answer.version, answer.fingerprint) == ("run", 0, "weights-0")
        assert [group.prompt for group in answer.groups] == asked.prompts
        for index, group in enumerate(answer.groups):
            seed = derive_group_seed("run\0evaluation", 0, index)
            assert [response.seed for response in group.responses] == [seed, seed + 1, seed + 2]
            assert [r.reward for r in group.responses] == [len(r.tokens) / 4 for r in group.responses]
    assert memory.events == [("published", 0), ("evaluated", 0)]
    assert memory.groups == []


async def test_the_same_evaluation_again_is_not_sampled_again_and_another_one_has_to_wait() -> None:
    one = engine("0", delay=lambda r: 0.05)
    async with serving(one) as service:
        await service.evaluate(evaluation())
        await service.evaluate(evaluation())
        with pytest.raises(Conflict, match=r"evaluation of version 0 is running, 6 of 6 groups are not finished: wait"):
            await service.evaluate(evaluation(num_prompts=2))
        first = await service.evaluated(0, 10)
        await service.evaluate(evaluation())
        assert await service.evaluated(0, 0) == first
        assert one.num_served == 6
        await service.evaluate(evaluation(num_prompts=2))
        assert len(decoded(await service.evaluated(0, 10)).groups) == 2


async def test_an_evaluation_beside_an_iteration_mixes_nothing_into_its_slots() -> None:
    memory = Memory()
    async with serving(engine("0", delay=lambda r: 0.01), engine("1"), memory=memory) as service:
        await service.submit(submission())
        await service.evaluate(evaluation())
        slots, data = await asyncio.gather(all_slots(service), service.evaluated(0, 10))
        assert trained(slots) == list(range(8))
        rows = {part.row for slot in slots.values() for part in slot.parts}
        assert rows == {f"row-{index}" for index in range(8)}
        assert [group.prompt.row for group in decoded(data).groups] == [f"held-out-{index}" for index in range(6)]
        service.complete(0)
    assert all(group.prompt.row.startswith("row-") for group in memory.groups)
    assert len(memory.groups) == 8


async def test_an_evaluation_waits_while_training_wants_the_engines() -> None:
    order: list[bool] = []
    has_asked = asyncio.Event()

    class Watched(ScriptedEngine):
        async def generate(self, request):
            order.append(request.can_wait)
            await has_asked.wait()
            return await super().generate(request)

    one = Watched("0", engine("0").script)
    assert one.state is EngineState.READY
    pool = EnginePool(lambda: [one], 2, lambda engine, error: None, lambda: None)
    async with serving(one) as service:
        service.engines.generate = pool.generate
        service.engines.max_in_flight = 64
        await service.evaluate(evaluation())
        while pool.num_waiting < 4:
            await asyncio.sleep(0)
        await service.submit(submission())
        # All of training's groups, after four of the evaluation's.
        while pool.num_waiting < 12:
            await asyncio.sleep(0)
        has_asked.set()
        await service.evaluated(0, 10)
    # Two were in flight before training asked for any.
    assert order == [True, True, *[False] * 8, *[True] * 4]


async def test_nothing_is_published_while_an_evaluation_runs_and_a_new_trainer_ends_it() -> None:
    async with serving(engine("0", delay=lambda r: 5.0)) as service:
        await service.evaluate(evaluation())
        with pytest.raises(Conflict, match=r"wait for it with GET /v1/evaluations/0 before publishing"):
            await service.publish(weights(1))
        await service.take_lease("run")
        with pytest.raises(EvaluationFailed, match="another trainer holds the lease now"):
            await service.evaluated(0, 1)
        await service.publish(weights(1))


@pytest.mark.parametrize(
    ("engines", "memory", "changes", "reason"),
    [
        ((engine("0", delay=lambda r: 5.0),), Memory(), {"deadline_seconds": 0.2}, "6 of 6 .* after 0.2 s, its deadl"),
        ((engine("0", group_faults={"run-0-evaluation-3": "cut"}),), Memory(), {}, "no engine is left"),
        ((engine("0"),), Memory(full=True), {}, "the audit log cannot be written"),
    ],
)
async def test_an_evaluation_that_cannot_be_finished_fails_by_name_and_training_continues(
    engines, memory, changes, reason
) -> None:
    async with serving(*engines, memory=memory) as service:
        await service.evaluate(evaluation(**changes))
        with pytest.raises(EvaluationFailed, match=f"the evaluation of version 0 failed: .*{reason}"):
            await service.evaluated(0, 10)
        assert service.status()["evaluation"]["is_over"]
        await service.publish(weights(1))


async def test_an_evaluation_sampled_with_other_weights_fails() -> None:
    async with serving(engine("0", keeps_old_weights=True)) as service:
        await service.publish(weights(1))
        await service.evaluate(evaluation(1))
        with pytest.raises(EvaluationFailed, match="fingerprint is 'weights-0'.*sampled 3 times"):
            await service.evaluated(1, 10)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda s: s.evaluate(evaluation(1)), r"version 1 .* is to be evaluated, and the engines hold 0 .*publish it"),
        (lambda s: s.evaluate(evaluation(run="other")), "the lease is held by the run 'run', not by 'other'"),
        (lambda s: s.evaluated(3, 0), "version 3 is not being evaluated, there was none: POST /v1/evaluations first"),
    ],
)
async def test_an_evaluation_out_of_turn_is_refused_with_what_to_do(
    act: Callable[[RolloutService], Awaitable[None]], message: str
) -> None:
    async with serving() as service:
        with pytest.raises(Conflict, match=message):
            await act(service)


@pytest.mark.parametrize(
    ("make", "sampling", "message"),
    [
        (submission, {"temperature": 0.0}, r"temperature 0 must .* at least 0.01.*only evaluations may be greedy"),
        (submission, {"temperature": 0.001}, "temperature 0.001"),
        (submission, {"temperature": -1.0}, "temperature -1"),
        (submission, {"temperature": float("inf")}, "temperature inf must be finite"),
        (submission, {"temperature": float("nan")}, "temperature nan"),
        (submission, {"max_tokens": 0}, "max_tokens 0 must be at least 1"),
        (submission, {"min_tokens": 9}, "min_tokens 9 must be from 0 to max_tokens, which is 8"),
        (evaluation, {"temperature": -0.5}, "temperature -0.5.* or 0 for greedy"),
        (evaluation, {"temperature": 0.005}, "temperature 0.005"),
        (evaluation, {"temperature": float("nan")}, "temperature nan"),
    ],
)
def test_sampling_that_an_engine_would_quietly_change_is_refused_by_its_value_at_both_ends(
    make, sampling, message
) -> None:
    bad = wire.Sampling(**{"max_tokens": 8, **sampling})
    with pytest.raises(InputError, match=message):
        msgspec.structs.replace(make(), sampling=bad)
    whole = msgspec.msgpack.decode(wire.encode(make()))
    forged = msgspec.msgpack.encode({**whole, "sampling": msgspec.to_builtins(bad)})
    with pytest.raises(InputError, match=message):
        wire.decode(forged, type(make()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 2}, "group_size 2 at temperature 0: greedy responses to one prompt are equal"),
        ({"group_size": 0}, "group_size 0 of an evaluation"),
        ({"prompts": []}, "an evaluation of 0 prompts"),
        ({"prompts": evaluation().prompts[1:]}, "and indices 0, 1, 2"),
        ({"deadline_seconds": 0.0}, "deadline_seconds 0"),
    ],
)
def test_an_evaluation_with_a_senseless_value_is_refused(changes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        evaluation(**changes)


def test_a_client_gets_an_evaluation_while_an_iteration_runs(tmp_path: Path) -> None:
    with started_server(tmp_path, engine("0", delay=lambda r: 0.02), engine("1")) as server, started(server) as client:
        client.submit(submission())
        answer = client.evaluate(evaluation())
        assert [group.prompt.index for group in answer.groups] == list(range(6))
        assert client.evaluate(evaluation()) == answer
        for place in [(replica, index) for replica in range(2) for index in range(2)]:
            client.slot(0, *place, 10)
        client.complete(0)
        client.publish(weights(1), 10)
        with pytest.raises(RolloutError, match="409.*publish it first"):
            client.evaluate(evaluation(0, num_prompts=3))


def test_a_client_is_told_why_an_evaluation_failed(tmp_path: Path) -> None:
    with started_server(tmp_path, engine("0", delay=lambda r: 5.0)) as server, started(server) as client:
        with pytest.raises(EvaluationLost, match="6 of 6 groups are not finished after 0.3 s"):
            client.evaluate(evaluation(deadline_seconds=0.3))
        client.publish(weights(1), 10)


def test_a_greedy_evaluation_on_vllm_gives_the_tokens_that_transformers_would_choose(
    engine: VllmEngine, models: Models, run
) -> None:
    reference = Reference(models.second)

    async def check(held: wire.Weights) -> wire.Evaluated:
        service = RolloutService(Engines(engine), RewardLength(), Memory())
        await service.take_lease("test")
        await service.publish(held)
        asked = evaluation(
            held.version, run="test", fingerprint=held.fingerprint, sampling=wire.Sampling(max_tokens=8, temperature=0)
        )
        await service.evaluate(asked)
        answer = decoded(await service.evaluated(held.version, 60))
        await service.close()
        return answer

    with in_shared_memory(models.second, 71) as held:
        answer = run(check(held))
    pairs = []
    for group in answer.groups:
        (response,) = group.responses
        asked = GroupRequest(
            "", tuple(wire.decode_tokens(group.prompt.tokens)), 1, response.seed, wire.Sampling(max_tokens=8)
        )
        assert reference.num_greedy(asked, response) == len(wire.decode_tokens(response.tokens))
        pairs.append((asked, response))
    assert reference.error_over_bound(pairs) <= 1


async def test_an_evaluation_is_in_the_audit_log_and_of_the_version_that_was_published(tmp_path: Path) -> None:
    async with recording(tmp_path) as (service, recorder):
        await service.evaluate(evaluation())
        groups = decoded(await service.evaluated(0, 10)).groups
        recorder.audit.record_evaluation(evaluation(1), groups)
    report = verify(tmp_path)
    recorded = report.evaluations[0]
    assert (recorded.version, recorded.num_prompts, recorded.num_responses) == (0, 6, 6)
    assert recorded.mean_reward == sum(response.reward for group in groups for response in group.responses) / 6
    assert [str(breach.name) for breach in report.breaches] == ["version not published"]
    assert "version 1 is evaluated but was not published last" in report.breaches[0].detail
    assert not list((tmp_path / "journal").glob("*.journal"))
