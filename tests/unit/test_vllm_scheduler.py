"""Outputs that are held in vLLM's core: joined, they are what vLLM sends. Nothing is lost, and no stream waits."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

from megatron_rl.sidecar.vllm import scheduler
from megatron_rl.sidecar.vllm.scheduler import HoldsOutputs, join_outputs

GROUP = SamplingParams(max_tokens=9, logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)


class Steps:
    """A scheduler whose steps are given."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.pause_state = PauseState.UNPAUSED
        self.num_statistics = 0

    def update_from_output(self, scheduler_output: list[EngineCoreOutput], model_runner_output: Any) -> dict[int, Any]:
        for output in scheduler_output:
            if output.finish_reason is not None:
                del self.requests[output.request_id]
        return {0: EngineCoreOutputs(outputs=list(scheduler_output))} if scheduler_output else {}

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Any]:
        return [self.requests.pop(name) for name in request_ids if name in self.requests]

    def has_requests(self) -> bool:
        return self.has_unfinished_requests()

    def has_unfinished_requests(self) -> bool:
        return self.pause_state != PauseState.PAUSED_ALL and bool(self.requests)

    def make_stats(self, *statistics: Any) -> str:
        self.num_statistics += 1
        return "statistics"


class Holding(HoldsOutputs, Steps):
    """Steps whose outputs are held."""

    def ask(self, name: str, params: SamplingParams = GROUP, resumable: bool = False) -> None:
        self.requests[name] = SimpleNamespace(
            request_id=name, sampling_params=params, resumable=resumable, client_index=0
        )

    def step(self, *outputs: EngineCoreOutput) -> list[EngineCoreOutput]:
        """Return what is sent after a step with these outputs."""
        messages = self.update_from_output(list(outputs), SimpleNamespace(logprobs=None))
        return messages[0].outputs if messages else []


@pytest.fixture
def holding(monkeypatch: pytest.MonkeyPatch) -> Holding:
    monkeypatch.setattr(scheduler, "SECONDS", 1e9)
    return Holding()


def output(name: str, *tokens: int, end: FinishReason | None = None, **fields: Any) -> EngineCoreOutput:
    column = np.array(tokens, np.int32)[:, None]
    log_probs = LogprobsLists(column, -column.astype(np.float32) / 3, column[:, 0] * 0)
    return EngineCoreOutput(name, list(tokens), new_logprobs=log_probs, finish_reason=end, **fields)


def test_a_request_is_sent_once_with_all_its_tokens_and_log_probs(holding: Holding) -> None:
    holding.ask("a")
    assert not any(holding.step(output("a", token)) for token in range(200))
    (sent,) = holding.step(output("a", 200, end=FinishReason.STOP, stop_reason=200))
    assert sent.new_token_ids == list(range(201))
    expected = output("a", *range(201)).new_logprobs
    for found, true in zip(sent.new_logprobs[:3], expected[:3], strict=True):
        assert found.tobytes() == true.tobytes()
        assert found.dtype == true.dtype
    assert (sent.finish_reason, sent.stop_reason) == (FinishReason.STOP, 200)
    assert not holding._held


def test_every_field_of_a_step_arrives_with_the_joined_output() -> None:
    prefill = PrefillStats()
    steps = [
        output("a", 1, prefill_stats=prefill, events=["one"], routed_experts=np.zeros((3, 2))),
        output(
            "a",
            2,
            prefill_stats=PrefillStats(),
            events=["two", "three"],
            routed_experts=np.ones((1, 2)),
            num_nans_in_logits=4,
        ),
        output("a", end=FinishReason.LENGTH, kv_transfer_params={"k": 1}, trace_headers={"t": "1"}),
    ]
    joined = join_outputs(steps)
    assert joined.prefill_stats is prefill
    assert joined.events == ["one", "two", "three"]
    assert joined.routed_experts.tolist() == [[0, 0]] * 3 + [[1, 1]]
    assert (joined.kv_transfer_params, joined.trace_headers) == ({"k": 1}, {"t": "1"})
    assert joined.num_nans_in_logits == 0
    assert joined.new_token_ids == [1, 2]


def test_joining_in_any_parts_gives_the_same() -> None:
    steps = [output("a", token, events=[token]) for token in range(6)]
    whole = join_outputs(steps)
    for cuts in itertools.combinations(range(1, 6), 2):
        parts = [steps[: cuts[0]], steps[cuts[0] : cuts[1]], steps[cuts[1] :]]
        again = join_outputs([join_outputs(part) for part in parts])
        assert (again.new_token_ids, again.events) == (whole.new_token_ids, whole.events)
        assert again.new_logprobs.logprobs.tobytes() == whole.new_logprobs.logprobs.tobytes()


@pytest.mark.parametrize(
    "changes", [{"output_kind": RequestOutputKind.DELTA}, {"output_kind": RequestOutputKind.CUMULATIVE},
                {"stop": ["end"], "detokenize": True}], ids=str,
)  # fmt: skip
def test_streams_and_requests_with_stop_strings_are_sent_after_each_step(changes: dict, holding: Holding) -> None:
    holding.ask("a", SamplingParams(**{"output_kind": RequestOutputKind.FINAL_ONLY, **changes}))
    for token in range(3):
        one = output("a", token)
        assert holding.step(one) == [one]
    holding.ask("b", resumable=True)
    assert len(holding.step(output("b", 1))) == 1


def test_an_aborted_request_ends_with_the_tokens_that_were_held(holding: Holding) -> None:
    holding.ask("a")
    holding.ask("not begun")
    holding.step(output("a", 1), output("a", 2))
    holding.finish_requests(["a", "not begun"], RequestStatus.FINISHED_ABORTED)
    assert holding.has_requests()
    sent = holding.step()
    assert [(one.request_id, one.new_token_ids, one.finish_reason) for one in sent] == [
        ("a", [1, 2], FinishReason.ABORT), ("not begun", [], FinishReason.ABORT),
    ]  # fmt: skip
    assert not holding.has_requests()


def test_nothing_is_held_over_a_pause_that_keeps_requests(holding: Holding) -> None:
    holding.ask("a")
    holding.step(output("a", 1))
    holding.pause_state = PauseState.PAUSED_ALL
    assert holding.has_requests()
    (sent,) = holding.step()
    assert (sent.new_token_ids, sent.finish_reason) == ([1], None)
    assert not holding.has_requests()
    holding.pause_state = PauseState.UNPAUSED
    (sent,) = holding.step(output("a", 2, end=FinishReason.LENGTH))
    assert sent.new_token_ids == [2]


def test_nothing_is_held_for_long(holding: Holding, monkeypatch: pytest.MonkeyPatch) -> None:
    holding.ask("a")
    assert not holding.step(output("a", 1))
    monkeypatch.setattr(scheduler, "SECONDS", 0)
    assert [one.new_token_ids for one in holding.step(output("a", 2))] == [[1, 2]]


def test_statistics_are_sent_seldom_and_when_the_core_has_nothing_more_to_do(
    holding: Holding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "STATISTICS_SECONDS", 1e9)
    holding.ask("a")
    assert holding.make_stats(None, None) is None
    assert holding.make_stats("of a step", None) == "statistics"
    holding.finish_requests(["a"], RequestStatus.FINISHED_ERROR)
    assert holding.make_stats() == "statistics"


def test_outputs_with_unknown_fields_are_not_held_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(scheduler._JOINS, "events")
    holding = Holding()
    holding.ask("a")
    assert len(holding.step(output("a", 1))) == 1
    assert "unknown fields: events" in caplog.text
    holding.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    assert [(one.new_token_ids, one.finish_reason) for one in holding.step()] == [([], FinishReason.ABORT)]
