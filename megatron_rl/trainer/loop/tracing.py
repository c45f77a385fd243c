"""A rank's trace: its clock against rank 0's, its file, and the line that ends an iteration."""

import collections
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.errors import MegatronRLError
from megatron_rl.observe.trace import (
    FOLDER,
    MAIN,
    SIDECAR,
    Exchange,
    Offset,
    Recorder,
    TraceFile,
    ask_clock,
    estimate_offset,
    find_own_offset,
)
from megatron_rl.shared.protocol.client import RolloutClient
from megatron_rl.shared.records.append_file import AppendFailed
from megatron_rl.trainer.mcore.session import Session
from megatron_rl.trainer.mcore.step.trace import StepTrace

_NUM_QUESTIONS = 8
# The number of the sidecar's last answers that count; it is asked once an iteration.
_NUM_ANSWERS = 16


class RankTrace:
    """The trace of a rank. It cannot fail a run: if its file cannot be written, it says so and ends."""

    def __init__(
        self,
        file: TraceFile,
        recorder: Recorder,
        steps: StepTrace,
        sidecar: RolloutClient | None,
        offset: float,
        say: Callable[[str], None],
    ) -> None:
        """`sidecar`, which has a clock, is rank 0's; `offset` is the seconds that rank 0 adds to its own clock."""
        self.steps = steps
        self.recorder = recorder
        self._file: TraceFile | None = file
        self._sidecar = sidecar
        self._offset = offset
        self._say = say
        self._answers: collections.deque[Exchange] = collections.deque(maxlen=_NUM_ANSWERS)
        self._writing = recorder.kind(MAIN, "trace")

    def begin(self) -> None:
        self._ask(_NUM_QUESTIONS)
        self.recorder.restart()

    def end(self, version: int) -> None:
        """Write the line of an iteration."""
        begun = self.recorder.now()
        self.steps.settle()
        facts = self._ask(1)
        self.recorder.add(self._writing, begun, self.recorder.now())
        taken = self.recorder.take()
        if self._file is not None:
            try:
                self._file.write(version, taken, **facts)
            except AppendFailed as error:
                self._say(f"the trace ends here: {error}")
                self.close()
        self.recorder.add(self._writing, taken["end"], self.recorder.now())

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _ask(self, count: int) -> dict[str, Any]:
        """Ask the sidecar for its time, and return the offset of its clock and the bound of the error."""
        if self._sidecar is None:
            return {}
        try:
            self._answers.extend(ask_clock(self.recorder.now, self._sidecar.clock, count))
        except MegatronRLError:
            # If the sidecar is lost, the loop reports it.
            self._sidecar = None
            return {}
        found = estimate_offset(self._answers)
        return {"clocks": {SIDECAR: [self._offset - found.seconds, found.error]}}


def open_trace(
    run: Path, session: Session, version: int, sidecar: RolloutClient | None, say: Callable[[str], None]
) -> RankTrace:
    """Begin or resume the trace of a run; every rank calls it. Drop its lines of `version` and later ones."""
    offset, error = align_clocks(session)
    where = session.coordinates
    facts = {"offset": offset, "error": error, "replica": session.replica}
    facts |= {"stage": where.pipeline_rank, "tensor": where.tensor_rank}
    name = f"rank-{session.rank}"

    def open_file() -> TraceFile:
        file = TraceFile(run, name, facts)
        file.restart(version)
        # Lines of ranks that an earlier attempt had and this one does not.
        for path in (run / FOLDER).glob("rank-*.jsonl") if session.rank == 0 else ():
            number = path.stem.removeprefix("rank-")
            if number.isdecimal() and int(number) >= session.world_size:
                other = TraceFile(run, path.stem)
                other.restart(version)
                other.close()
        return file

    file = session.run_or_raise_everywhere(open_file)
    recorder = Recorder()
    steps = StepTrace(recorder, session.platform)
    return RankTrace(file, recorder, steps, sidecar if session.rank == 0 else None, offset, say)


def align_clocks(session: Session) -> tuple[float, float]:
    """Return the seconds that this rank adds to its clock for the common one, and the bound of the error."""
    anchor = session.broadcast(find_own_offset())
    found = Offset(0.0, 0.0)
    for rank in range(1, session.world_size):
        if session.rank == rank:
            found = estimate_offset(ask_clock(time.monotonic, lambda: _hear(session, 0), _NUM_QUESTIONS))
        elif session.rank == 0:
            for _ in range(_NUM_QUESTIONS):
                _answer(session, rank)
    return anchor + found.seconds, found.error


def _hear(session: Session, rank: int) -> float:
    told = torch.zeros(1, dtype=torch.float64)
    dist.send(told, rank, group=session.control_group)
    dist.recv(told, rank, group=session.control_group)
    return float(told)


def _answer(session: Session, rank: int) -> None:
    box = torch.zeros(1, dtype=torch.float64)
    dist.recv(box, rank, group=session.control_group)
    box[0] = time.monotonic()
    dist.send(box, rank, group=session.control_group)
