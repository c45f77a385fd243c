"""One evaluation, separate from every iteration: the groups of all its prompts, or the reason of its failure."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from megatron_rl.errors import MegatronRLError
from megatron_rl.shared.protocol import wire
from megatron_rl.sidecar.group_maker import Work

_log = logging.getLogger(__name__)

MakeAll = Callable[[wire.Evaluation, Work], Awaitable[str | None]]
Figures = dict[str, float] | str | msgspec.UnsetType
Measure = Callable[[wire.Evaluation], Coroutine[Any, Any, Figures]]
"""Returns the figures of a command, or the reason why there are none."""


async def measure_nothing(evaluation: wire.Evaluation) -> Figures:
    return msgspec.UNSET


class EvaluationFailed(MegatronRLError):
    """The evaluation cannot be finished."""


class EvaluationRun:
    """An evaluation from its start to its answer. Belongs to the event loop that starts it."""

    def __init__(
        self,
        evaluation: wire.Evaluation,
        make_all: MakeAll,
        record: Callable[[wire.Evaluation, list[wire.Group]], None],
        measure: Measure = measure_nothing,
    ) -> None:
        """Start the evaluation; `record` is called before it is answered."""
        self.evaluation = evaluation
        self._record = record
        self._failure: str | None = None
        self._answer: bytes | None = None
        self._groups: dict[int, wire.Group] = {}
        self._prompts = iter(evaluation.prompts)
        self._ended = asyncio.Event()
        self._task = asyncio.create_task(self._run(make_all, measure))

    @property
    def version(self) -> int:
        return self.evaluation.version

    @property
    def is_over(self) -> bool:
        """True once it has an answer or has failed."""
        return self._ended.is_set()

    def is_same(self, evaluation: wire.Evaluation) -> bool:
        """Check whether this evaluation is the same and has not failed: a failed one may be tried again."""
        return self._failure is None and self.evaluation == evaluation

    async def answer(self, patience: float) -> bytes | None:
        """Return the encoded `wire.Evaluated`; None if it is not finished within `patience` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), patience)
        if self._failure is not None:
            raise EvaluationFailed(f"the evaluation of version {self.version} failed: {self._failure}")
        return self._answer

    async def stop(self, reason: str) -> None:
        """End it unless it is over; all requests that wait for it get the reason."""
        if not self.is_over:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._end(reason)

    def next_prompt(self) -> wire.Prompt | None:
        """Return the next prompt to sample; None after the last one."""
        return next(self._prompts, None)

    def finished(self, group: wire.Group) -> None:
        self._groups[group.prompt.index] = group

    def is_wanted(self, prompt: int) -> bool:
        """Return True: all prompts are answered."""
        return True

    def missing(self) -> str:
        """Describe the groups that are missing until it can end."""
        num_prompts = len(self.evaluation.prompts)
        return f"{num_prompts - len(self._groups)} of {num_prompts} groups are not finished"

    def status(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "failure": self._failure,
            "is_over": self.is_over,
            "num_prompts": len(self.evaluation.prompts),
            "num_finished": len(self._groups),
        }

    async def _run(self, make_all: MakeAll, measure: Measure) -> None:
        measuring = asyncio.create_task(self._measure(measure))
        try:
            reason = await make_all(self.evaluation, self)
            figures = await measuring if reason is None else msgspec.UNSET
        finally:
            measuring.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await measuring
        if reason is None:
            try:
                self._finish(figures)
            except (OSError, MegatronRLError) as error:
                reason = f"the audit log cannot be written: {error}"
        self._end(reason)

    async def _measure(self, measure: Measure) -> Figures:
        try:
            return await measure(self.evaluation)
        except Exception as error:
            _log.exception("version %d", self.version)
            return f"the sidecar failed: {error!r}; its log has the traceback"

    def _finish(self, figures: Figures) -> None:
        evaluation = self.evaluation
        groups = [self._groups[prompt.index] for prompt in evaluation.prompts]
        self._record(evaluation, groups)
        self._answer = wire.encode(
            wire.Evaluated(
                run=evaluation.run,
                version=evaluation.version,
                fingerprint=evaluation.fingerprint,
                groups=groups,
                figures=figures,
            )
        )

    def _end(self, failure: str | None) -> None:
        self._failure = failure
        self._ended.set()
