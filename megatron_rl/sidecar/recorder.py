"""The records of a run: groups and claims in the journal, all events in the audit log, and the spans of the trace.

The journal is written first, so that every group and claim in the audit log can be restored. For the trace the event
loop appends a constant number of spans a group, and encodes a line when an iteration is complete.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from megatron_rl.observe.trace import SIDECAR, Recorder, TraceFile, find_own_offset
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.slots import Claim
from megatron_rl.shared.protocol.turns import list_rewards
from megatron_rl.shared.records.append_file import AppendFailed
from megatron_rl.shared.records.audit_events import EngineReport, ProbeRecord
from megatron_rl.shared.records.audit_log import FILE_NAME, AuditLog
from megatron_rl.shared.records.journal import JOURNALS, Journal, JournalFolder
from megatron_rl.sidecar.publication import Proof


class RunRecorder:
    """The records of one run, in its folder, from which an iteration is restored after a restart."""

    def __init__(self, folder: Path, run: str, retain: int = 2, scoring: str = ""):
        self._journals = JournalFolder(folder / JOURNALS, retain, scoring=scoring)
        try:
            self.audit = AuditLog(folder / FILE_NAME, run)
        except BaseException:
            self._journals.close()
            raise
        self._journal: Journal | None = None
        self._submission: wire.Submission | None = None
        self._objective: dict[str, str] | None = None
        self._reported: set[str] = set()
        """The engines whose weights the log has reported."""
        self._num_scored: dict[int, int] = {}
        """The scored responses of each finished group, and of all that are claimed."""
        self._num_trained = 0

    def published(self, weights: wire.Weights, proofs: Sequence[Proof]) -> None:
        """Record that all engines hold a version."""
        self._reported = set()
        self.joined(weights, proofs)

    def joined(self, weights: wire.Weights, proofs: Sequence[Proof]) -> None:
        """Record that these engines hold the version too, after its publish."""
        reports = [_build_report(proof) for proof in proofs]
        self.audit.record_publish(weights.version, weights.fingerprint, reports, weights.proof, weights.base)
        self._reported |= {proof.engine for proof in proofs}

    def not_proven(self, weights: wire.Weights, wrong: Mapping[str, str]) -> None:
        """Record that engines hold other weights than the version that they report."""
        for engine, reason in wrong.items():
            self.audit.record_refusal(weights.version, weights.fingerprint, engine, reason)

    def judged(self, version: int, mismatch: wire.Mismatch) -> None:
        """Record the mismatch that the trainer measured, before it completes or refuses the iteration."""
        self.audit.record_mismatch(version, mismatch)

    def trained(self, version: int, trained: wire.Trained) -> None:
        """Record the trainer's report, before it completes the iteration; an objective only if it has changed."""
        self.judged(version, trained.mismatch)
        if isinstance(trained.plug_ins, dict):
            self.audit.record_plug_ins(version, trained.plug_ins)
        if isinstance(trained.objective, dict) and trained.objective != self._objective:
            self.audit.record_objective(version, trained.objective)
            self._objective = trained.objective

    def begin(self, submission: wire.Submission) -> tuple[list[wire.Group], list[Claim]]:
        """Begin an iteration; return the groups and claims that an earlier attempt at it left."""
        self._end_journal()
        self._journal, self._submission = self._journals.open(submission), submission
        recovered = self._journal.recovered
        self._num_scored, self._num_trained = {}, 0
        self.audit.record_submission(submission)
        for group in recovered.groups:
            self._group(submission, group, is_restored=True)
        for claim in recovered.claims:
            self._claim(submission, claim)
        return recovered.groups, recovered.claims

    def restored(self) -> None:
        """Free what `begin` returned."""
        journal, _ = self._current()
        journal.forget_recovered()

    def finished(self, group: wire.Group) -> None:
        journal, submission = self._current()
        journal.append_group(group)
        self._group(submission, group)

    def claimed(self, claim: Claim) -> None:
        journal, submission = self._current()
        journal.append_claim(claim)
        self._claim(submission, claim)

    def completed(self, version: int) -> None:
        """Record that the trainer has trained on the whole iteration."""
        _, submission = self._current()
        self.audit.record_completion(version, submission.plan.num_prompts, self._num_trained)

    def failed(self, version: int, reason: str) -> None:
        """Record that the iteration ended without an update."""
        self.audit.record_failure(version, reason)

    def evaluated(self, evaluation: wire.Evaluation, groups: list[wire.Group]) -> None:
        """Record an evaluation. It is not journaled: after a kill it is evaluated again."""
        self.audit.record_evaluation(evaluation, groups)

    def head(self) -> tuple[str, int]:
        """Return hash and number of the audit log's last line."""
        return self.audit.head, self.audit.last

    def close(self) -> None:
        self._end_journal()
        self._journals.close()
        self.audit.close()

    def _group(self, submission: wire.Submission, group: wire.Group, is_restored: bool = False) -> None:
        """Record a group; an engine that joined after the publish, or left before a restart, is reported with it."""
        joined = {
            engine: response.fingerprint
            for response in group.responses
            for engine in (response.engine, *(span.engine for span in response.spans))
            if engine and engine not in self._reported
        }
        if joined:
            reports = [
                EngineReport(engine=name, version=submission.version, fingerprint=fingerprint)
                for name, fingerprint in joined.items()
            ]
            self.audit.record_publish(submission.version, submission.fingerprint, reports)
            self._reported |= joined.keys()
        self.audit.record_group(submission.version, group, is_restored)
        self._num_scored[group.prompt.index] = len(list_rewards(group.responses))

    def _claim(self, submission: wire.Submission, claim: Claim) -> None:
        self.audit.record_claim(submission.version, claim)
        self._num_trained += sum(self._num_scored[prompt] for prompt in claim.prompts)

    def _current(self) -> tuple[Journal, wire.Submission]:
        assert self._journal is not None
        assert self._submission is not None
        return self._journal, self._submission

    def _end_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None


def _build_report(proof: Proof) -> EngineReport:
    record = None
    if proof.difference is not None and proof.bound is not None:
        record = ProbeRecord(mean=proof.difference.mean, largest=proof.difference.largest, bound=proof.bound)
    return EngineReport(
        engine=proof.engine,
        version=proof.report.version,
        fingerprint=proof.report.fingerprint,
        compared=proof.report.num_compared,
        parameters=proof.report.num_parameters,
        probe=record,
        quantization=proof.report.quantization or msgspec.UNSET,
    )


_log = logging.getLogger(__name__)


class SidecarTrace:
    """The trace of a sidecar; empty without a folder. A file that cannot be written ends the trace."""

    def __init__(self, run: Path | None = None, engines: Callable[[], Mapping[str, int]] = dict) -> None:
        """Open the trace; `engines` returns the responses that each engine samples at a time."""
        self.recorder = Recorder() if run is not None else Recorder(most=0)
        self._engines = engines
        self._file = TraceFile(run, SIDECAR, {"offset": find_own_offset(), "error": None}) if run is not None else None
        self._version: int | None = None

    def begin(self, version: int) -> None:
        """Begin a version that is published; drop the file's lines of this version and later ones."""
        if self._file is None:
            return
        if self._version is None:
            # Earlier spans belong to the start, and to no iteration.
            self.recorder.restart()
        if self._file.last_version >= version:
            self._file.restart(version)
        self._version = version

    def end_last(self) -> None:
        """Write the spans after the last iteration, if there are any."""
        if self.recorder.has_spans:
            self.end()

    def end(self) -> None:
        """Write the spans since the last line."""
        if self._file is None or self._version is None:
            return
        try:
            self._file.write(self._version, self.recorder.take(), engines=dict(self._engines()))
        except AppendFailed as error:
            _log.warning("the trace ends here: %s", error)
            self.close()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None
