"""Records of the sidecar: publishes by engine and step, groups from submission to reward, engines that were down."""

import asyncio
from collections import Counter
from pathlib import Path

from megatron_rl.analysis.ledger import compute_ledger
from megatron_rl.observe import trace
from megatron_rl.observe.trace import Process, Span
from megatron_rl.sidecar.engines.scripted import Script, ScriptedEngine, ScriptedFactory
from megatron_rl.sidecar.recorder import SidecarTrace
from megatron_rl.sidecar.service import RolloutService
from megatron_rl.sidecar.supervisor import Supervisor
from tests.sidecar.scripted_service import PLAN, Memory, RewardLength, evaluation, submission, weights
from tests.sidecar.supervised import CONFIG, until

ENGINES = {"engine-0": 4, "engine-1": 4}


class Factory(ScriptedFactory):
    """A factory whose first engine dies of one group."""

    def __init__(self, fatal: str | None):
        super().__init__(Script())
        self._fatal = fatal

    def create(self, name: str) -> ScriptedEngine:
        fatal, self._fatal = self._fatal, None
        return ScriptedEngine(name, Script(group_faults={} if fatal is None else {fatal: "die"}))


def record(folder: Path, versions: range, fatal: str | None = None, evaluates: bool = False) -> Process:
    """Run iterations with a trace, and return the trace."""

    async def run() -> None:
        written = SidecarTrace(folder, lambda: ENGINES)
        supervisor = Supervisor(Factory(fatal), CONFIG, written.recorder)
        await supervisor.start(2)
        service = RolloutService(supervisor, RewardLength(), Memory(keeps=False), trace=written)
        await service.take_lease("run")
        try:
            for version in versions:
                await service.publish(weights(version))
                if evaluates:
                    await service.evaluate(evaluation(version))
                    assert await service.evaluated(version, 60)
                await service.submit(submission(version))
                for replica in range(PLAN.num_replicas):
                    for index in range(2):
                        assert await service.slot(version, replica, index, 60)
                service.complete(version)
                # As a rank that did not get the answer would.
                service.complete(version)
            if fatal is not None:
                await until(lambda: all(e["state"] == "ready" for e in supervisor.status()["engines"].values()))
                await service.publish(weights(versions.stop))
        finally:
            await service.close()
            await supervisor.close()
            written.close()

    asyncio.run(run())
    found = trace.read_trace(folder).sidecar
    assert found is not None
    return found


def spans_of(process: Process, name: str) -> list[Span]:
    return [span for window in process.windows for span in window.spans if span.name == name]


def test_every_group_is_queued_sampled_and_scored_and_belongs_to_its_iteration(tmp_path):
    found = record(tmp_path, range(2))
    assert [window.version for window in found.windows] == [0, 1]
    for window in found.windows:
        for name in ("queue", "generate", "reward"):
            assert sorted(span.number for span in window.spans if span.name == name) == list(range(PLAN.num_prompts))
        assert [span.number for span in window.spans if span.name == "iteration"] == [window.version]
        for span in window.spans:
            assert window.begin - 1e-6 <= span.begin <= span.end <= window.end + 1e-6
    generated = spans_of(found, "generate")
    assert {span.details["size"] for span in generated} == {PLAN.group_size}
    assert all(span.amount for span in generated)
    assert {span.details["engine"] for span in generated} <= set(ENGINES)


def test_a_group_queues_from_the_submission_until_an_engine_takes_it_and_is_scored_once_it_is_sampled(tmp_path):
    (window,) = record(tmp_path, range(1)).windows
    whole = {(span.name, span.number): span for span in window.spans}
    assert len({whole["queue", prompt].begin for prompt in range(PLAN.num_prompts)}) == 1
    for prompt in range(PLAN.num_prompts):
        queued, sampled, scored = (whole[name, prompt] for name in ("queue", "generate", "reward"))
        assert abs(queued.end - sampled.begin) < 2e-6
        assert sampled.end <= scored.begin + 2e-6


def test_every_engine_takes_every_step_of_a_publish(tmp_path):
    found = record(tmp_path, range(2))
    steps = Counter((span.lane, span.name) for window in found.windows for span in window.spans if span.lane in ENGINES)
    assert steps == {(name, step): 2 for name in ENGINES for step in ("pause", "load", "commit", "probe", "open")}


def test_groups_of_an_evaluation_are_marked(tmp_path):
    found = record(tmp_path, range(1), evaluates=True)
    marked = [span for span in spans_of(found, "generate") if span.details.get("evaluation")]
    assert sorted(span.number for span in marked) == list(range(len(evaluation(0).prompts)))
    assert len(spans_of(found, "evaluation")) == 1
    assert len([span for span in spans_of(found, "reward") if "evaluation" not in span.details]) == PLAN.num_prompts


def test_a_lost_engine_is_down_until_it_takes_groups_again_and_its_group_failed(tmp_path):
    found = record(tmp_path, range(1), fatal="run-0-0")
    failed = [span for span in spans_of(found, "generate") if span.details.get("failed")]
    assert failed[0].number == 0
    queued = Counter(span.number for span in spans_of(found, "queue"))
    assert queued == Counter([*range(PLAN.num_prompts), *(span.number for span in failed)])
    (down,) = spans_of(found, "down")
    assert down.lane == failed[0].details["engine"]


def test_a_resumed_run_drops_what_is_done_again(tmp_path):
    record(tmp_path, range(3))
    assert [window.version for window in record(tmp_path, range(1, 4)).windows] == [0, 1, 2, 3]


def test_the_ledger_accounts_for_all_of_every_engines_time(tmp_path):
    record(tmp_path, range(2), evaluates=True)
    accounts = compute_ledger(trace.read_trace(tmp_path))
    assert [account.name for account in accounts] == list(ENGINES)
    assert all(account.seconds["other"] == 0 for account in accounts)


def test_without_a_folder_nothing_is_kept(tmp_path):
    off = SidecarTrace()
    off.begin(0)
    off.recorder.add(off.recorder.kind("service", "publish"), 0.0, 1.0)
    assert not off.recorder.has_spans
    off.end()
    off.close()
