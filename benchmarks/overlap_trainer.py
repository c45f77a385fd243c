"""Run the trainer of the benchmark `overlap`: its iterations are synchronous and periodic in turns.

python -m benchmarks.overlap_trainer OUT both|sync <flags of pretrain_grpo.py>
"""

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from megatron_rl.command_line.parse import parse_run
from megatron_rl.observe.metrics import read_metrics


def main() -> None:
    out, schedules, *words = sys.argv[1:]
    settings = parse_run(words)
    from megatron_rl.trainer.data.slots import IterationSlots
    from megatron_rl.trainer.loop.learner import Learner
    from megatron_rl.trainer.loop.measures import Learned
    from megatron_rl.trainer.loop.rollouts import SCHEDULES
    from megatron_rl.trainer.loop.run import train
    from megatron_rl.trainer.mcore.session import Session

    seconds: list[float] = []

    def in_turns(slots: IterationSlots, session: Session) -> None:
        """Make even iterations synchronous."""
        SCHEDULES["periodic" if slots.identity.version % 2 else "sync"](slots, session)

    learn = Learner.learn

    def timed(
        self: Learner, slots: IterationSlots, equal: Collection[str], mismatch_bound: float | None = None
    ) -> Learned:
        start, waited = time.monotonic(), 0.0
        waiting = slots._waiting

        @contextlib.contextmanager
        def counted(index: int) -> Iterator[None]:
            nonlocal waited
            begun = time.monotonic()
            with waiting(index):
                yield
            waited += time.monotonic() - begun

        slots._waiting = counted
        learned = learn(self, slots, equal, mismatch_bound)
        seconds.append(time.monotonic() - start - waited)
        return learned

    Learner.learn = timed  # type: ignore[assignment, method-assign]
    train(settings, schedule=SCHEDULES["sync"] if schedules == "sync" else in_turns)
    folder = settings.rollout.folder
    assert folder is not None
    Path(out).write_text(json.dumps(_iterations(folder, seconds, schedules == "sync")))


def _iterations(folder: Path, seconds: list[float], is_sync: bool) -> list[dict]:
    metrics = read_metrics(folder)[-len(seconds) :]
    generation = _read_generation(folder, len(seconds))
    return [
        {
            "is_sync": is_sync or record["version"] % 2 == 0,
            "whole": record["time"]["iteration"],
            "publish": record["time"]["publish"],
            "first": generated.first,
            "generate": generated.whole,
            "tail": generated.tail,
            "train": trained,
            "tokens": record["tokens"]["response"],
        }
        for record, generated, trained in zip(metrics, generation, seconds, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Generation:
    """Seconds of an iteration."""

    first: float
    """Seconds from submission to the first group."""
    whole: float
    """Seconds from there to the last group."""
    tail: float
    """Seconds from there until the trainer has done with it."""


def _read_generation(folder: Path, count: int) -> list[Generation]:
    """Read the seconds of the last iterations, as the sidecar wrote them down."""
    begun, groups = 0.0, list[float]()
    found: list[Generation] = []
    for line in (folder / "audit.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "submit":
            begun, groups = event["time"], []
        elif event["event"] == "group":
            groups.append(event["time"])
        elif event["event"] == "complete":
            found.append(Generation(groups[0] - begun, groups[-1] - begun, event["time"] - groups[-1]))
    return found[-count:]


if __name__ == "__main__":
    main()
