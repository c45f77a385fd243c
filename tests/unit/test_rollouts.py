"""A rank's side of an iteration: the times when it asks for slots."""

import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from megatron_rl.algorithm.advantages import GroupAdvantages
from megatron_rl.algorithm.settings import AlgorithmConfig
from megatron_rl.platforms.cpu import CpuPlatform
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.client import RolloutError
from megatron_rl.shared.protocol.slots import divide
from megatron_rl.trainer.data.batch import Batcher
from megatron_rl.trainer.data.slots import Identity
from megatron_rl.trainer.loop.rollouts import Rollouts, Schedule, SubmissionTerms, start_at_once, wait_for_all
from megatron_rl.trainer.loop.saver import RunState

IDENTITY = Identity("run", 3, "weights-3")
PLAN = wire.Plan(num_prompts=4, group_size=2, num_replicas=2, micro_batch_size=4)


def rollouts(rank: int, agree: Callable[[Callable], Any], client: Any, put_off: Sequence[str] = ()) -> Rollouts:
    session: Any = types.SimpleNamespace(
        rank=rank,
        replica=rank,
        platform=CpuPlatform(),
        run_or_raise_everywhere=agree,
        replica_group=None,
    )
    prompts: Any = types.SimpleNamespace(put_off=list(put_off), peek=lambda count, num_carried: [])
    terms = SubmissionTerms(divide(PLAN), wire.Sampling(max_tokens=8), 5.0)
    batcher = Batcher(GroupAdvantages(AlgorithmConfig(advantage="mean")))
    return Rollouts(client, session, terms, lambda baseline: batcher, start_at_once, prompts if rank == 0 else None)


@pytest.mark.parametrize(("rank", "expected"), [(0, ["agreed", "submitted", "asked"]), (1, ["agreed", "asked"])])
def test_no_rank_asks_for_a_slot_before_all_of_them_know_that_the_iteration_was_submitted(rank, expected) -> None:
    events: list[str] = []

    def agree(action: Callable) -> Any:
        events.append("agreed")
        return action()

    def ask(*_: object) -> bytes:
        events.append("asked")
        return wire.encode(wire.Slot(run="run", version=3, fingerprint="weights-3", replica=rank, index=0, parts=[]))

    client = types.SimpleNamespace(submit=lambda _: events.append("submitted"), encoded_slot=ask)
    with rollouts(rank, agree, client).iteration(IDENTITY) as slots:
        slots._fetch(0)
    assert events == expected


def test_a_submission_that_is_refused_ends_the_ranks_that_wait_for_it() -> None:
    def agree(_: Callable) -> None:
        raise RolloutError("refused (on rank 0)")

    with pytest.raises(RolloutError, match="refused"), rollouts(1, agree, None).iteration(IDENTITY):
        pass


@pytest.mark.parametrize(("count", "named"), [
    (1, "row-0. "), (5, "row-0, row-1, row-2, row-3, row-4. "),
    (300, "row-0, row-1, row-2, row-3, row-4 and 295 more, which `megatron-rl audit` lists. "),
])  # fmt: skip
def test_prompts_that_were_put_off_are_counted_and_the_first_are_named(count: int, named: str) -> None:
    (said,) = rollouts(0, lambda action: action(), None, [f"row-{row}" for row in range(count)]).list_put_off(None)
    assert said.startswith(f"note: {count} prompts that --rollout-tail carry put off were not trained on")
    assert f"{2 * count} responses: {named}No checkpoint holds them" in said


def test_without_prompts_that_were_put_off_nothing_is_said_of_them() -> None:
    for rank in (0, 1):
        assert rollouts(rank, lambda action: action(), None).list_put_off(None) == []


def _report_seconds(schedule: Schedule, reported: list[float]) -> dict[str, Any]:
    """Complete an iteration with this schedule, and return what is known of the engines."""
    answers: list[wire.EnvironmentTimes | None] = [None]
    drafts: list[wire.Drafts | None] = [None]

    def complete(version: int, mismatch: wire.Mismatch, plug_ins: object, seconds: float, objective: object) -> Any:
        reported.append(seconds)
        census = types.SimpleNamespace(num_considered=4, put_off=[], rewards=[], reward=0.0)
        return types.SimpleNamespace(
            head="", census=census, num_in_flight=64, environments=answers[-1], drafts=drafts[-1]
        )

    session: Any = types.SimpleNamespace(rank=0, platform=CpuPlatform())
    prompts: Any = types.SimpleNamespace(put_off=[], advance=lambda *_: None)
    client: Any = types.SimpleNamespace(complete=complete)
    terms = SubmissionTerms(divide(PLAN), wire.Sampling(max_tokens=8), 5.0)
    one = Rollouts(client, session, terms, lambda baseline: Batcher(None), schedule, prompts)  # type: ignore[arg-type]
    one.complete(0, wire.Mismatch(mean=0.0, largest=0.0, bound=None), 2.5)
    described = one.describe_engines()
    answers[:] = [wire.EnvironmentTimes(mean=0.25, p95=0.5)]
    one.complete(1, wire.Mismatch(mean=0.0, largest=0.0, bound=None), 2.5)
    times = {"max_in_flight": 64, "environment_mean": 0.25, "environment_p95": 0.5}
    assert one.describe_engines() == {"time": times}
    # Four drafts of three tokens each, and of these five were accepted: a response got nine tokens in four steps.
    drafts[:] = [wire.Drafts(count=4, drafted=12, accepted=5)]
    one.complete(2, wire.Mismatch(mean=0.0, largest=0.0, bound=None), 2.5)
    times |= {"drafted_tokens": 12, "accepted_tokens": 5, "accepted_length": 9 / 4}
    assert one.describe_engines() == {"time": times}
    return described


def test_seconds_of_training_overlap_with_sampling_unless_the_trainer_waits_for_all_groups() -> None:
    reported: list[float] = []
    assert _report_seconds(start_at_once, reported) == {"time": {"max_in_flight": 64}}
    _report_seconds(wait_for_all, reported)
    assert reported == [2.5, 2.5, 2.5, 0.0, 0.0, 0.0]


def test_an_iteration_has_the_mean_reward_of_the_one_before_and_is_recorded_with_its_plug_ins() -> None:
    given: list[float | None] = []
    recorded: list[object] = []

    def make_batcher(baseline: float | None) -> Any:
        given.append(baseline)
        return Batcher(GroupAdvantages(AlgorithmConfig(advantage="mean")))

    def complete(version: int, mismatch: wire.Mismatch, plug_ins: object, seconds: float, objective: object) -> Any:
        recorded.append(plug_ins)
        census = types.SimpleNamespace(num_considered=4, put_off=[], rewards=[], reward=0.25 + version)
        return types.SimpleNamespace(
            head=f"head {version}", census=census, num_in_flight=None, environments=None, drafts=None
        )

    session: Any = types.SimpleNamespace(
        rank=0, replica=0, platform=CpuPlatform(), run_or_raise_everywhere=lambda action: action(),
        replica_group=None, broadcast=lambda item: item,
    )  # fmt: skip
    prompts: Any = types.SimpleNamespace(
        put_off=[], peek=lambda count, num_carried: [], advance=lambda *_: None, num_resting=None
    )
    client: Any = types.SimpleNamespace(submit=lambda _: None, complete=complete)
    for has_baseline, expected in ((True, [0.75, 0.25, 1.25]), (False, [0.75, None, None])):
        given.clear()
        recorded.clear()
        terms = SubmissionTerms(divide(PLAN), wire.Sampling(max_tokens=8), 5.0, has_baseline, {"own.py": "hash"})
        one = Rollouts(client, session, terms, make_batcher, start_at_once, prompts, state=RunState("", 0.75))
        for version in range(3):
            with one.iteration(Identity("run", version, "weights")):
                pass
            one.complete(version, wire.Mismatch(mean=0.0, largest=0.0, bound=None), 1.0)
        assert given == expected
        assert recorded == [{"own.py": "hash"}] * 3
        assert one.state == RunState("head 2", 2.25 if has_baseline else None)
