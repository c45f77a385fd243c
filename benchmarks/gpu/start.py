"""Start a run with its own engine, and note what it says and when; its iterations have the balanced load."""

import os
import tempfile
from pathlib import Path

from benchmarks.gpu import engine, schedules
from benchmarks.gpu.work import Work

# Scripted engines on the CPU start at once, and have no model.
SCRIPTED = ("--rollout-engine", "scripted", "--rollout-script")


def measure(work: Work) -> None:
    """Add the moments of a start, and the row of the balanced load."""
    load = schedules.TINY if work.is_tiny else schedules.BALANCED
    with tempfile.TemporaryDirectory() as temporary:
        reward = Path(temporary) / "reward.py"
        reward.write_text(schedules.REWARD)
        words = ["--reward", f"{reward}:parity", "--reward-workers", "1"]
        if work.is_tiny:
            script = Path(temporary) / "script.json"
            script.write_text('{"lengths": [2, 8]}')
            words += [*SCRIPTED, str(script)]
        else:
            words += engine.list_words(work)
        try:
            run = schedules.run_trainer(work, load, Path(temporary) / f"start-{os.getpid()}", words, is_own=True)
        except TimeoutError as error:
            work.leave_out("start", str(load), str(error))
            return
    for said in run.said:
        work.add("start", said.text, at=said.seconds)
    work.add("start", "the first iteration begins", at=run.start)
    schedules.add_row(work, load, run)
