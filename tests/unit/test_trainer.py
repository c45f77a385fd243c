"""The loop of every stage: the order of its calls, and its end."""

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.config.settings import LoopConfig
from megatron_rl.observe.timeline import Timeline
from megatron_rl.trainer.data.slots import Identity
from megatron_rl.trainer.loop.measures import Learned, Measures
from megatron_rl.trainer.loop.reporter import Reporter, RunLog, Untraced
from megatron_rl.trainer.loop.saver import RunState
from megatron_rl.trainer.loop.stop import Course, StopRequest
from megatron_rl.trainer.loop.trainer import Trainer


class Told(Reporter):
    """Notes the metrics that are written, and the remarks."""

    def __init__(self, events: list[Any]) -> None:
        self._events = events
        self.written: list[dict[str, Any]] = []

    def write(self, version: int, metrics: dict[str, Any]) -> None:
        self.written.append(metrics)

    def say(self, text: str) -> None:
        self._events.append(text)


@dataclasses.dataclass
class NotedStage:
    """A stage, an evaluator and a saver in one, which note their calls."""

    log: RunLog
    events: list[Any]
    learn_hook: Callable[[], object] = lambda: None
    fingerprint: str = "weights"
    rates: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"trained": "tokens"})
    last_saved: Path | None = None

    @property
    def evaluator(self) -> Any:
        return self

    @property
    def state(self) -> RunState:
        return RunState("head", 0.5)

    def publish(self, version: int) -> Identity:
        self.events.append(f"publish {version}")
        return Identity("run", version, self.fingerprint)

    def is_due(self, version: int, is_last: bool) -> bool:
        return is_last or version % 2 == 0

    def evaluate(self, identity: Identity) -> dict[str, Any]:
        self.events.append(f"evaluate {identity.version}")
        return {"loss": 1.0}

    def learn(self, identity: Identity) -> Learned:
        self.events.append(f"learn {identity.version}")
        self.learn_hook()
        return Learned([], Measures(sums={"tokens": 8.0}))

    def describe(self, learned: Learned, measures: Measures) -> dict[str, Any]:
        return {"tokens": measures.sums["tokens"]}

    def list_remarks(self, checkpoint: Path | None) -> Sequence[str]:
        return ["remark"]

    def save_if_due(self, version: int, is_last: bool, state: RunState) -> None:
        assert state == RunState("head", 0.5)
        self.events.append(f"save {version}{', the last' if is_last else ''}")

    def finish(self) -> None:
        self.events.append("finish")

    def close(self) -> None:
        self.events.append("close")


def alone() -> Any:
    return SimpleNamespace(rank=0, replica=0, broadcast=lambda item: item, gather=lambda item: [item])


def trained(
    version: int, num_iterations: int, interval: int | None = None, is_asked: bool = False, fingerprint: str = "weights"
) -> tuple[int, list[Any], list[dict[str, Any]]]:
    """Run the loop, which may be asked to stop in its first iteration; return the version, the calls, the metrics."""
    events: list[Any] = []
    told = Told(events)
    stop = StopRequest(1.0, lambda reason: None)
    hook = stop._note if is_asked else lambda: None
    stage: Any = NotedStage(RunLog(told, Timeline(), Untraced()), events, hook, fingerprint)
    course = Course(version, num_iterations, stop, LoopConfig(exit_interval=interval), lambda: 0.0)
    reached = Trainer(alone(), stage, stage, course).train()
    return reached, events, told.written


def test_an_iteration_is_published_evaluated_learned_from_and_saved():
    reached, events, written = trained(0, 2)
    assert reached == 2
    assert events == [
        "publish 0", "evaluate 0", "learn 0", "save 1",
        "publish 1", "learn 1", "save 2, the last",
        "publish 2", "evaluate 2", "finish", "remark",
    ]  # fmt: skip
    assert [metrics["version"] for metrics in written] == [0, 1, 2]
    assert ["evaluation" in metrics for metrics in written] == [True, False, True]
    assert all(metrics["fingerprint"] == "weights" for metrics in written)
    assert written[0]["time"]["trained_tokens_per_second"] == 8.0 / written[0]["time"]["iteration"]
    assert "time" not in written[2]


@pytest.mark.parametrize("ends", [{"interval": 1}, {"is_asked": True}])
def test_a_loop_that_ends_early_saves_the_iteration_and_evaluates_nothing_more(ends):
    reached, events, _ = trained(0, 3, **ends)
    assert reached == 1
    assert events == ["publish 0", "evaluate 0", "learn 0", "save 1, the last", "finish", "remark"]


def test_a_loop_without_an_iteration_left_evaluates_the_last_version_and_has_no_remarks():
    reached, events, _ = trained(2, 2)
    assert reached == 2
    assert events == ["publish 2", "evaluate 2", "finish"]


def test_the_metrics_of_a_stage_without_engines_have_no_fingerprint():
    _, _, written = trained(0, 1, fingerprint="")
    assert all("fingerprint" not in metrics for metrics in written)


def test_a_trainer_closes_its_stage_even_if_the_terminal_is_lost():
    events: list[Any] = []

    class Lost(Reporter):
        def close(self) -> None:
            raise OSError("the terminal is lost")

    stage: Any = NotedStage(RunLog(Lost(), Timeline(), Untraced()), events)
    course = Course(0, 1, StopRequest(1.0, lambda reason: None), LoopConfig(), lambda: 0.0)
    trainer = Trainer(alone(), stage, stage, course)
    with pytest.raises(OSError, match="the terminal is lost"):
        trainer.tidy()
    assert events == ["close"]
    # Another thread asks where the loop is.
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(trainer.place))
    thread.start()
    thread.join()
    assert found == [(0, "other")]
