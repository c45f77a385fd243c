"""The loop of supervised fine-tuning: take demonstrations, update."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from megatron_rl.mcore.session import Session
from megatron_rl.observe.timeline import Timeline
from megatron_rl.training.measures import Measures, UpdateOutcome, describe_auxiliary
from megatron_rl.training.reporter import MetricsReporter
from megatron_rl.training.saver import Saver
from megatron_rl.training.stop import ExitLimits, StopRequest
from megatron_rl.training.supervised.evaluator import SupervisedEvaluator
from megatron_rl.training.supervised.learner import SupervisedLearner, SupervisedUpdate
from megatron_rl.training.supervised.packs import Demonstrations


class SupervisedTrainer:
    """One rank of the run. Version v is the model after v iterations, each of which is one update."""

    def __init__(
        self,
        session: Session,
        demonstrations: Demonstrations,
        learner: SupervisedLearner,
        saver: Saver,
        evaluator: SupervisedEvaluator | None,
        reporter: MetricsReporter | None,
        timeline: Timeline,
        stop: StopRequest,
        limits: ExitLimits,
        finish_iteration: Callable[[int], None],
        largest_micro_batch: int,
        version: int,
        num_iterations: int,
    ):
        """Training goes on from `version` until `num_iterations` have been done in all. Only rank 0 has a reporter."""
        self._session = session
        self._demonstrations = demonstrations
        self._learner = learner
        self.saver = saver
        self._evaluator = evaluator
        self.reporter = reporter
        self._timeline = timeline
        self._stop = stop
        self._limits = limits
        self._finish_iteration = finish_iteration
        self._largest_micro_batch = largest_micro_batch
        self._version = version
        self._num_iterations = num_iterations

    def train(self) -> int:
        """Run the loop and return the version reached: less than asked for after SIGTERM, or at a limit."""
        version, num_iterations = self._version, self._num_iterations
        is_stopped = False
        self._stop.begin()
        while version < num_iterations and not is_stopped:
            if self.reporter is not None:
                self.reporter.begin(version)
            evaluation = self._evaluate(version)
            with self._during("train"):
                learned = self._learner.learn(self._demonstrations.take())
            is_stopped = self._report(version, learned, evaluation)
            version += 1
            with self._during("save"):
                self.saver.save_if_due(version, is_stopped or version == num_iterations)
        if not is_stopped:
            self._evaluate_last(version)
        with self._during("save"):
            self.saver.finish()
        return version

    @property
    def place(self) -> tuple[int, str]:
        """Where the loop is, as `Timeline.place`; any thread may ask."""
        return self._timeline.place

    def tidy(self) -> None:
        """Restore the terminal of a run that is being ended."""
        if self.reporter is not None:
            self.reporter.close()

    @contextlib.contextmanager
    def _during(self, phase: str) -> Iterator[None]:
        if self.reporter is not None:
            self.reporter.phase(phase)
        with self._timeline.span(phase):
            yield

    def _evaluate(self, version: int, is_last: bool = False) -> dict[str, Any]:
        """Return the metrics of an evaluation; none where none is due."""
        if self._evaluator is None or not self._evaluator.is_due(version, is_last):
            return {}
        with self._during("evaluate"):
            return {"evaluation": self._evaluator.evaluate()}

    def _evaluate_last(self, version: int) -> None:
        evaluation = self._evaluate(version, is_last=True)
        if evaluation and self.reporter is not None:
            self.reporter.write(version, {"version": version, **evaluation})

    def _report(self, version: int, learned: SupervisedUpdate, evaluation: dict[str, Any]) -> bool:
        """Write the iteration down; return whether any rank was asked to stop, or has reached a limit."""
        self._finish_iteration(version)
        reason = self._limits.find_reason(version + 1)
        handed_in = self._session.gather((learned.measures, self._stop.is_asked or reason is not None))
        if self.reporter is not None:
            measures = Measures()
            for of_rank, _ in handed_in:
                measures.merge(of_rank)
            metrics = {
                "version": version,
                **compute_supervised_metrics(measures, learned.outcome, self._largest_micro_batch),
            }
            metrics |= {"epochs": self._demonstrations.epochs, **evaluation}
            times = self._timeline.take()
            times["trained_tokens_per_second"] = measures.sums["tokens.computed"] / times["iteration"]
            self.reporter.write(version, metrics | {"time": times})
        return any(is_asked for _, is_asked in handed_in)


def compute_supervised_metrics(measures: Measures, outcome: UpdateOutcome, largest_micro_batch: int) -> dict[str, Any]:
    """Compute the metrics of an iteration from all replicas' measures."""
    sums = measures.sums
    metrics: dict[str, Any] = {
        "loss": sums["loss"] / outcome.denominator,
        "demonstrations": int(sums["demonstrations"]),
        "gradient_norm": outcome.gradient_norm,
        "learning_rate": outcome.learning_rate,
        "skipped_updates": int(not outcome.was_taken),
        "tokens": {
            "prompt": int(sums["tokens.prompt"]),
            "response": int(sums["tokens.response"]),
            "computed": int(sums["tokens.computed"]),
            "utilisation": sums["tokens.computed"] / (sums["micro_batches"] * largest_micro_batch),
        },
    }
    if outcome.gradient_zeros is not None:
        metrics["gradient_zeros"] = outcome.gradient_zeros
    return metrics | describe_auxiliary(sums)
