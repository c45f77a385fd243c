"""Start a run with its own engine, and note what it says and when; its iterations have the balanced load."""

import os
import tempfile
from pathlib import Path

from benchmarks.gpu import engine, schedules
from benchmarks.gpu.work import Work

# Scripted engines on the CPU start at once, and have no model.
SCRIPTED = ("--rollout-engine", "scripted", "--rollout-script")


def measure(work: Work) -> None:
    """Add the moments of a start, those of one that is out of time too, and the row of the balanced load."""
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
            words += engine.WORDS_OF_RUN
        folder = Path(temporary) / f"start-{os.getpid()}"
        run = None
        try:
            run = schedules.run_trainer(work, load, folder, words, is_own=True)
        except TimeoutError as error:
            work.leave_out("schedules", str(load), str(error))
        for said in schedules.find_said(schedules.find_output(folder, load).read_text(), folder):
            work.add("start", said.text, at=said.seconds)
        if run is not None:
            work.add("start", "the first iteration begins", at=run.start)
            schedules.add_row(work, load, run)
