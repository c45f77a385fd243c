"""The trainer of the benchmark `overlap`: its iterations are synchronous and periodic in turns.

python -m benchmarks.overlap_trainer OUT both|sync <flags of pretrain_grpo.py>
"""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.arguments.command_line import parse_run
from megatron_rl.observe.metrics import read


def main() -> None:
    out, schedules, *words = sys.argv[1:]
    settings = parse_run(words)
    from megatron_rl.data.slots import IterationSlots
    from megatron_rl.mcore.session import Session
    from megatron_rl.training.build import train
    from megatron_rl.training.learner import Learned, Learner
    from megatron_rl.training.rollouts import SCHEDULES

    seconds: list[float] = []

    def in_turns(slots: IterationSlots, session: Session) -> None:
        """Even iterations are synchronous."""
        SCHEDULES["periodic" if slots.identity.version % 2 else "sync"](slots, session)

    learn = Learner.learn

    def timed(
        self: Learner, slots: IterationSlots, reference_is_policy: bool, mismatch_bound: float | None = None
    ) -> Learned:
        start, waited = time.monotonic(), 0.0
        waiting = slots._waiting

        @contextlib.contextmanager
        def counted() -> Iterator[None]:
            nonlocal waited
            begun = time.monotonic()
            with waiting():
                yield
            waited += time.monotonic() - begun

        slots._waiting = counted
        learned = learn(self, slots, reference_is_policy, mismatch_bound)
        seconds.append(time.monotonic() - start - waited)
        return learned

    Learner.learn = timed  # type: ignore[method-assign]
    train(settings, schedule=SCHEDULES["sync"] if schedules == "sync" else in_turns)
    folder = settings.rollout.folder
    assert folder is not None
    Path(out).write_text(json.dumps(_iterations(folder, seconds, schedules == "sync")))


def _iterations(folder: Path, seconds: list[float], is_sync: bool) -> list[dict]:
    metrics = read(folder)[-len(seconds) :]
    generation = _generation(folder, len(seconds))
    return [
        {
            "is_sync": is_sync or record["version"] % 2 == 0,
            "whole": record["time"]["iteration"],
            "publish": record["time"]["publish"],
            "generate": generated,
            "train": trained,
            "tokens": record["tokens"]["response"],
        }
        for record, generated, trained in zip(metrics, generation, seconds, strict=True)
    ]


def _generation(folder: Path, count: int) -> list[float]:
    """From submission to the last group, of the last iterations, as the sidecar wrote them down."""
    begun, last = 0.0, 0.0
    found: list[float] = []
    for line in (folder / "audit.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "submit":
            begun = event["time"]
        elif event["event"] == "group":
            last = event["time"]
        elif event["event"] == "complete":
            found.append(last - begun)
    return found[-count:]


if __name__ == "__main__":
    main()
