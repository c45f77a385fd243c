"""The loop of a run. The stage decides how an iteration learns: `grpo.py`, `supervised.py`."""

import abc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from megatron_rl.trainer.data.slots import Identity
from megatron_rl.trainer.loop.measures import Evaluator, Learned, Measures
from megatron_rl.trainer.loop.reporter import RunLog
from megatron_rl.trainer.loop.saver import RunState, Saver
from megatron_rl.trainer.loop.stop import Course
from megatron_rl.trainer.loop.watch import Loop
from megatron_rl.trainer.mcore.session import Session


class Stage(abc.ABC):
    """The part of an iteration that --stage decides; all ranks call each method, unless it says otherwise."""

    log: RunLog
    evaluator: Evaluator
    rates: ClassVar[Mapping[str, str]]
    """The rates in the metrics, in tokens per second: by name, the measure that counts the tokens."""

    @property
    def state(self) -> RunState:
        """The values that the last iteration left to the next one."""
        return RunState()

    @abc.abstractmethod
    def publish(self, version: int) -> Identity:
        """Bring the policy to the engines, if the stage has any; return the identity of its weights."""

    @abc.abstractmethod
    def learn(self, identity: Identity) -> Learned:
        """Make the updates of an iteration."""

    @abc.abstractmethod
    def describe(self, learned: Learned, measures: Measures) -> dict[str, Any]:
        """Return an iteration's metrics, on rank 0; `measures` are those of all replicas."""

    def list_remarks(self, checkpoint: Path | None) -> Sequence[str]:
        """Return lines for people at the end of a run, on rank 0; `checkpoint` is the last one that it wrote."""
        return ()

    def close(self) -> None:
        """Release what must not outlive the process; a second call does nothing."""


class Trainer(Loop):
    """One rank of the run. Version v is the model after v iterations."""

    def __init__(self, session: Session, stage: Stage, saver: Saver, course: Course) -> None:
        self.saver = saver
        self.log = stage.log
        self._session = session
        self._stage = stage
        self._evaluator = stage.evaluator
        self._course = course

    def train(self) -> int:
        """Run the loop and return the version reached: less than asked for after SIGTERM, or at a limit."""
        version, num_iterations = self._course.version, self._course.num_iterations
        is_stopped = False
        self._course.stop.begin()
        self.log.trace.begin()
        while version < num_iterations and not is_stopped:
            self.log.reporter.begin(version)
            identity = self._stage.publish(version)
            evaluation = self._evaluate(identity)
            learned = self._stage.learn(identity)
            is_stopped = self._report(identity, learned, evaluation)
            version += 1
            with self.log.phase("save"):
                self.saver.save_if_due(version, is_stopped or version == num_iterations, self._stage.state)
            self.log.trace.end(version - 1)
        if not is_stopped:
            self._evaluate_last(version)
        self._finish(version)
        return version

    @property
    def place(self) -> tuple[int, str]:
        return self.log.timeline.place

    def describe_interrupt(self) -> str:
        return self.saver.describe_loss()

    def tidy(self) -> None:
        """Clean up a run that is being ended: restore the terminal, leave no published weights in memory."""
        try:
            self.log.reporter.close()
        finally:
            self._stage.close()

    def _evaluate(self, identity: Identity, is_last: bool = False) -> dict[str, Any]:
        """Return the metrics of an evaluation; none if none is due."""
        if not self._evaluator.is_due(identity.version, is_last):
            return {}
        with self.log.phase("evaluate"):
            return {"evaluation": self._evaluator.evaluate(identity)}

    def _evaluate_last(self, version: int) -> None:
        """Publish and evaluate the model after the last update, if evaluation is due."""
        # All ranks publish, even if only rank 0 has an evaluator.
        if self._session.broadcast(self._evaluator.is_due(version, is_last=True)):
            identity = self._stage.publish(version)
            self.log.reporter.write(version, _name(identity) | self._evaluate(identity, is_last=True))

    def _report(self, identity: Identity, learned: Learned, evaluation: Mapping[str, Any]) -> bool:
        """Report the iteration; return whether any rank was asked to stop, or has reached a limit."""
        version, log = identity.version, self.log
        with log.timeline.part("report"):
            log.finish_iteration(version)
            # Rank 0 writes samples of its own replica; another rank of the replica may have their log-probs.
            log_probs = learned.log_probs if self._session.replica == 0 else {}
            handed_in = self._session.gather((learned.measures, self._course.is_over(version + 1), log_probs))
            if self._session.rank == 0:
                measures = Measures()
                for of_rank, _, _ in handed_in:
                    measures.merge(of_rank)
                metrics = {**_name(identity), **self._stage.describe(learned, measures), **evaluation}
                times = log.timeline.take()
                for name, tokens in self._stage.rates.items():
                    times[f"{name}_tokens_per_second"] = measures.sums[tokens] / times["iteration"]
                metrics["time"] = times | metrics.get("time", {})
                kept = {slot: kept_N for _, _, of_rank in handed_in for slot, kept_N in of_rank.items()}
                log.reporter.iteration(version, metrics, learned.batches, kept)
            return any(is_over for _, is_over, _ in handed_in)

    def _finish(self, version: int) -> None:
        """Wait until everything is written, and print the remarks of the stage."""
        with self.log.phase("save"):
            self.saver.finish()
        self.log.trace.end(version)
        if version > self._course.version:
            for remark in self._stage.list_remarks(self.saver.last_saved):
                self.log.reporter.say(remark)


def _name(identity: Identity) -> dict[str, Any]:
    """Return the metrics that name an iteration's weights; without engines they have no fingerprint."""
    named: dict[str, Any] = {"version": identity.version}
    return named | {"fingerprint": identity.fingerprint} if identity.fingerprint else named
