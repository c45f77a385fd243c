"""The trainer of the benchmark `trace`: it records nothing of odd iterations, and times recording itself.

python -m benchmarks.trace_trainer OUT <flags of pretrain_grpo.py>
"""

import functools
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rl.command_line.parse import parse_run
from megatron_rl.observe.metrics import read_metrics


class Cost:
    """Seconds in calls, those within others counted once; the counting itself is included."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def count(self, owner: type, name: str) -> None:
        """Count a method of a class from now on."""
        method: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            self._depth += 1
            try:
                return method(*args, **options)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - begun

        setattr(owner, name, call)


def main() -> None:
    out, *words = sys.argv[1:]
    settings = parse_run(words)
    from megatron_rl.observe.trace import Recorder
    from megatron_rl.trainer.data.slots import Identity
    from megatron_rl.trainer.loop.grpo import GrpoStage
    from megatron_rl.trainer.loop.run import train
    from megatron_rl.trainer.loop.tracing import RankTrace
    from megatron_rl.trainer.mcore.step.trace import StepTrace

    cost = Cost()
    for owner, names in (
        (Recorder, ("kind", "add")),
        (StepTrace, ("begin_forward", "timer", "_begin_backward", "_end_forward")),
        (RankTrace, ("end",)),
    ):
        for name in names:
            cost.count(owner, name)
    # Wall and CPU time at the beginning of each iteration, and at the end of the last; seconds of recording until then.
    moments: list[tuple[float, float, float]] = []
    publish, end = GrpoStage.publish, RankTrace.end

    def publish_and_note(self: GrpoStage, version: int) -> Identity:
        moments.append((time.monotonic(), time.process_time(), cost.seconds))
        trace, is_on = self.log.trace, version % 2 == 0
        self.log.timeline._recorder = trace.recorder if is_on else None
        self.learner._trace = trace.steps if is_on else None
        return publish(self, version)

    def end_every_second(self: RankTrace, version: int) -> None:
        if version % 2:
            self.recorder.restart()
        else:
            end(self, version)
        if version == settings.training.train_iters - 1:  # type: ignore[operator]
            moments.append((time.monotonic(), time.process_time(), cost.seconds))

    GrpoStage.publish = publish_and_note  # type: ignore[method-assign]
    RankTrace.end = end_every_second  # type: ignore[method-assign]
    train(settings)
    folder = settings.rollout.folder
    assert folder is not None
    found = [
        {
            "wall": later[0] - now[0],
            "working": later[0] - now[0] - record["time"].get("wait", 0.0),
            "cpu": later[1] - now[1],
            "recording": later[2] - now[2],
            "tokens": record["tokens"]["computed"],
        }
        for record, (now, later) in zip(read_metrics(folder), itertools.pairwise(moments), strict=True)
    ]
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
