"""The loop: publish, submit, consume, update."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from megatron_rl.data.slots import IterationSlots
from megatron_rl.mcore.publish.shared_memory import Publisher
from megatron_rl.mcore.session import Session
from megatron_rl.mcore.step.policy import Policy, Reference
from megatron_rl.observe.timeline import Timeline
from megatron_rl.protocol.wire import PublishAnswer
from megatron_rl.training.evaluator import Evaluator
from megatron_rl.training.learner import Learned, Learner
from megatron_rl.training.measures import Measures, compute_metrics
from megatron_rl.training.mismatch import MismatchBounds
from megatron_rl.training.reporter import Reporter
from megatron_rl.training.rollouts import Rollouts
from megatron_rl.training.saver import Saver
from megatron_rl.training.stop import ExitLimits, StopRequest
from megatron_rl.training.tracing import RankTrace


class Trainer:
    """One rank of the run. Version v is the policy after v iterations.

    What only rank 0 has is None on the others: the evaluator and the reporter.
    """

    def __init__(
        self,
        session: Session,
        policy: Policy,
        publisher: Publisher,
        rollouts: Rollouts,
        learner: Learner,
        saver: Saver,
        evaluator: Evaluator | None,
        reporter: Reporter | None,
        timeline: Timeline,
        stop: StopRequest,
        limits: ExitLimits,
        finish_iteration: Callable[[int], None],
        reference: Reference | None,
        largest_micro_batch: int,
        mismatch_bounds: MismatchBounds,
        version: int,
        num_iterations: int,
        trace: RankTrace | None = None,
    ):
        """Training goes on from `version` until `num_iterations` have been done in all."""
        self._session = session
        self._policy = policy
        self._publisher = publisher
        self._rollouts = rollouts
        self._learner = learner
        self.saver = saver
        self._evaluator = evaluator
        self.reporter = reporter
        self._timeline = timeline
        self._stop = stop
        self._limits = limits
        self._finish_iteration = finish_iteration
        self._reference = reference
        self._largest_micro_batch = largest_micro_batch
        self._mismatch_bounds = mismatch_bounds
        self._version = version
        self._num_iterations = num_iterations
        self._trace = trace

    def train(self) -> int:
        """Run the loop and return the version reached: less than asked for after SIGTERM, or at a limit."""
        version, num_iterations = self._version, self._num_iterations
        is_stopped = False
        self._stop.begin()
        if self._trace is not None:
            self._trace.begin()
        while version < num_iterations and not is_stopped:
            if self.reporter is not None:
                self.reporter.begin(version)
            fingerprint = self._publish(version)
            evaluation = self._evaluate(version, fingerprint)
            reference_is_policy = self._compare_reference(version, fingerprint)
            with self._during("train"):
                with self._rollouts.iteration(version, fingerprint) as slots:
                    bound = self._mismatch_bounds.error(self._publisher.answer.kind)
                    learned = self._learner.learn(slots, reference_is_policy, bound)
                with self._timeline.part("complete"):
                    self._rollouts.complete(version, learned.mismatch)
            with self._timeline.part("report"):
                is_stopped = self._report(version, fingerprint, slots, learned, evaluation)
            version += 1
            with self._during("save"):
                is_last = is_stopped or version == num_iterations
                self.saver.save_if_due(version, is_last, self._rollouts.audit_head)
            if self._trace is not None:
                self._trace.end(version - 1)
        if not is_stopped:
            self._evaluate_last(version)
        with self._during("save"):
            self.saver.finish()
        if self._trace is not None:
            self._trace.end(version)
        if version > self._version:
            self._name_put_off()
        return version

    @property
    def place(self) -> tuple[int, str]:
        """Where the loop is, as `Timeline.place`; any thread may ask."""
        return self._timeline.place

    def tidy(self) -> None:
        """Clean up a run that is being ended: restore the terminal, leave no published weights in memory."""
        try:
            if self.reporter is not None:
                self.reporter.close()
        finally:
            self._publisher.close()

    @contextlib.contextmanager
    def _during(self, phase: str) -> Iterator[None]:
        if self.reporter is not None:
            self.reporter.phase(phase)
        with self._timeline.span(phase):
            yield

    def _publish(self, version: int) -> str:
        with self._during("publish"):
            self._policy.synchronize()
            return self._publisher.publish(version)

    def _compare_reference(self, version: int, fingerprint: str) -> bool:
        """Move the reference if that is due; return whether it is the policy that was published."""
        if self._reference is None:
            return False
        with self._timeline.part("reference"):
            self._reference.move_if_due(self._policy.wrapped, version, fingerprint)
            return self._reference.is_policy(self._policy.weights, version, fingerprint)

    def _evaluate(self, version: int, fingerprint: str, is_last: bool = False) -> dict[str, Any] | None:
        if self._evaluator is None or not self._evaluator.is_due(version, is_last):
            return None
        with self._during("evaluate"):
            evaluated = self._evaluator.evaluate(version, fingerprint)
            if self.reporter is not None:
                self.reporter.evaluation(version, evaluated.groups)
            return self._evaluator.summary(evaluated)

    def _name_put_off(self) -> None:
        """Name the prompts that were submitted and not trained on."""
        note = self._rollouts.describe_put_off(self.saver.last_saved)
        if self.reporter is not None and note is not None:
            self.reporter.say(note)

    def _evaluate_last(self, version: int) -> None:
        """Publish and evaluate the policy after the last update, if evaluation is due."""
        is_due = self._evaluator is not None and self._evaluator.is_due(version, is_last=True)
        if not self._session.broadcast(is_due):
            return
        fingerprint = self._publish(version)
        evaluation = self._evaluate(version, fingerprint, is_last=True)
        if self.reporter is not None:
            self.reporter.write(version, {"version": version, "fingerprint": fingerprint, "evaluation": evaluation})

    def _report(
        self, version: int, fingerprint: str, slots: IterationSlots, learned: Learned, evaluation: dict | None
    ) -> bool:
        """Write the iteration down; return whether any rank was asked to stop, or has reached a limit."""
        self._finish_iteration(version)
        reason = self._limits.find_reason(version + 1)
        # Samples are of rank 0's replica; its log-probs may be on another rank.
        log_probs = learned.log_probs if self._session.replica == 0 else {}
        handed_in = self._session.gather((learned.measures, self._stop.is_asked or reason is not None, log_probs))
        if self.reporter is not None:
            measures = Measures()
            for of_rank, _, _ in handed_in:
                measures.merge(of_rank)
            metrics = {"version": version, "fingerprint": fingerprint}
            metrics |= compute_metrics(measures, learned.updates, self._largest_micro_batch)
            metrics |= _describe_publish(self._publisher.answer)
            metrics |= {"reference": self._reference.fingerprint} if self._reference is not None else {}
            metrics |= {"evaluation": evaluation} if evaluation is not None else {}
            metrics |= self._rollouts.describe_prompts()
            metrics |= {"audit_head": self._rollouts.audit_head}
            times = self._timeline.take()
            times["generated_tokens_per_second"] = measures.sums["tokens.response"] / times["iteration"]
            times["trained_tokens_per_second"] = measures.sums["tokens.computed"] / times["iteration"]
            kept = {slot: kept_N for _, _, of_rank in handed_in for slot, kept_N in of_rank.items()}
            self.reporter.iteration(version, metrics | {"time": times}, slots, kept)
        return any(is_asked for _, is_asked, _ in handed_in)


def _describe_publish(answer: PublishAnswer) -> dict[str, Any]:
    """Return how many parameters of an engine were compared bit for bit; nothing of engines without a model."""
    if not answer.num_parameters:
        return {}
    return {"publish": {"compared": answer.num_compared, "parameters": answer.num_parameters}}
