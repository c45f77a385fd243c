"""The times of environments: their spans in the trace, and the seconds of their answers."""

import dataclasses

import pytest

from megatron_rl.observe.trace import Recorder
from megatron_rl.shared.protocol import wire
from megatron_rl.sidecar.conversations import EnvironmentClock, request_turn
from megatron_rl.sidecar.engines import GroupRequest

REQUEST = GroupRequest("run-1-4", (7, 8), 2, 100, wire.Sampling(max_tokens=12, max_turns=3), prompt=4, since=2.0)


class Watch:
    """A clock that is set by hand."""

    now = 5.0

    def __call__(self) -> float:
        return self.now


def test_a_group_waits_until_its_conversations_begin_and_each_call_of_an_environment_is_a_span():
    watch = Watch()
    recorder = Recorder(watch)
    clock = EnvironmentClock(recorder)
    clock.begin_group(REQUEST)
    for call, seconds in (("place", 1.0), ("open", 2.0), ("step", 0.25), ("step", 0.75), ("reward", 4.0)):
        end = clock.note(REQUEST)(call)
        watch.now += seconds
        end()
    taken = recorder.take()
    kinds = [taken["kinds"][span[0]] for span in taken["spans"]]
    assert kinds[0] == {"lane": "groups", "name": "queue"}
    assert kinds[2] == {"lane": "groups", "name": "environment", "call": "open"}
    # In microseconds after the recorder's begin, at 5 s; the group was submitted at 2 s.
    assert [span[1:] for span in taken["spans"]] == [
        [-3_000_000, 3_000_000, 4], [0, 1_000_000, 4], [1_000_000, 2_000_000, 4], [3_000_000, 250_000, 4],
        [3_250_000, 750_000, 4], [4_000_000, 4_000_000, 4],
    ]  # fmt: skip
    times = clock.end_iteration()
    assert times is not None
    assert (times.mean, times.p95) == (0.5, pytest.approx(0.25 + 0.95 * 0.5))
    assert clock.end_iteration() is None


def test_answers_of_an_evaluation_have_spans_of_their_own_and_do_not_count():
    recorder = Recorder(Watch())
    clock = EnvironmentClock(recorder)
    clock.note(dataclasses.replace(REQUEST, can_wait=True))("step")()
    assert recorder.take()["kinds"] == [{"lane": "groups", "name": "environment", "call": "step", "evaluation": True}]
    assert clock.end_iteration() is None


def test_a_turn_waits_for_an_engine_from_its_own_begin():
    assert request_turn(REQUEST, "0-0", (7, 8), 100, 12, None).since is None
