"""The contents of an audit log in sum, and its breaches."""

import dataclasses
from collections import Counter
from typing import NamedTuple

from megatron_rl.shared.protocol.turns import list_rewards
from megatron_rl.shared.protocol.wire import Proof
from megatron_rl.shared.records import audit_events
from megatron_rl.shared.records.audit_chain import Breach


@dataclasses.dataclass
class SourceSummary:
    """The groups whose prompts come from one file of the data."""

    num_groups: int = 0
    num_responses: int = 0
    reward: float = 0.0
    """Sum of the responses' rewards."""

    def count(self, group: audit_events.GroupFinished) -> None:
        rewards = list_rewards(group.responses)
        self.num_groups += 1
        self.num_responses += len(rewards)
        self.reward += sum(rewards)

    def add(self, other: "SourceSummary") -> None:
        self.num_groups += other.num_groups
        self.num_responses += other.num_responses
        self.reward += other.reward


@dataclasses.dataclass
class IterationSummary:
    """One attempt at an iteration, as the log has it."""

    version: int
    fingerprint: str
    line: int
    outcome: str = "unfinished"
    num_groups: int = 0
    num_restored: int = 0
    num_responses: int = 0
    num_tokens: int = 0
    num_claims: int = 0
    mismatch: float | None = None
    """Mean difference between the trainer's log-probs and those of the engines that sampled the tokens."""
    compared: tuple[int, int] | None = None
    """Parameters compared bit for bit, and their total, on the engine with the fewest; None without reports."""
    engines: set[str] = dataclasses.field(default_factory=set)
    sources: dict[str, SourceSummary] = dataclasses.field(default_factory=dict)
    """Groups by source."""
    unscored: Counter[str] = dataclasses.field(default_factory=Counter)
    """Responses that are not trained on, by cause."""
    refilled: Counter[str] = dataclasses.field(default_factory=Counter)
    """Failures after which a response was sampled again, by cause."""


@dataclasses.dataclass
class Proofs:
    """Counts of the proofs of the weights that engines report, over all publishes."""

    num_reports: int = 0
    num_whole: int = 0
    """Reports of engines that compared all of their parameters with the received weights."""
    num_weaker: int = 0
    """Reports of engines that compared fewer parameters, in a run that accepts the weaker proof."""
    num_probed: int = 0
    """Reports of engines whose log-probs were compared with the trainer's."""
    furthest: float = 0.0
    """Largest mean difference in these reports."""
    quantizations: dict[str, int] = dataclasses.field(default_factory=dict)
    """Reports of engines that quantize, by what they quantize."""
    bases: list[str] = dataclasses.field(default_factory=list)
    """Fingerprints of the bases on which engines got adapters alone."""

    def count(self, report: audit_events.EngineReport, proof: Proof | None) -> None:
        self.num_reports += 1
        self.num_whole += 0 < report.parameters == report.compared
        self.num_weaker += proof == "probe" and report.compared < report.parameters
        if isinstance(report.quantization, str):
            self.quantizations[report.quantization] = self.quantizations.get(report.quantization, 0) + 1
        if report.probe is not None:
            self.num_probed += 1
            self.furthest = max(self.furthest, report.probe.mean)


class PutOff(NamedTuple):
    """A prompt that was submitted and put off, with the number of responses that were asked for."""

    version: int
    prompt: int
    tokens: str
    """Hash of its tokens."""
    num_responses: int


class ObjectiveChange(NamedTuple):
    """A change of the objective, at a resume."""

    version: int
    changes: list[str]
    """Flags with their values before and after, and files with their hashes."""


def describe_weaker_proof(proofs: Proofs) -> str:
    """Say how many reports rest on the weaker proof."""
    return (
        f"the weaker proof was accepted (--publish-proof probe): in {proofs.num_weaker} of {proofs.num_reports} "
        "reports the engine did not compare all parameters, and only the probe's log-probs show what the others hold"
    )


@dataclasses.dataclass(frozen=True)
class Report:
    """The contents of a log, and its breaches."""

    run: str
    files: list[tuple[str, int]]
    """Files of the log, each with its number of lines; breaches count lines over all files."""
    head: str
    num_covered: int
    """Number of lines up to the last given head, which are proved to be unchanged."""
    num_starts: int
    num_recovered: int
    iterations: list[IterationSummary]
    evaluations: list[audit_events.Evaluate]
    proofs: Proofs
    changes: list[ObjectiveChange]
    put_off: list[PutOff] | None
    """Prompts that were put off when the log ended; None if the log does not begin with the run."""
    breaches: list[Breach]

    def count_failures(self) -> tuple[Counter[str], Counter[str]]:
        """Count the responses that are not trained on, and the failures after which one was sampled again, by cause."""
        complete = [one for one in self.iterations if one.outcome == "complete"]
        return sum((one.unscored for one in complete), Counter()), sum((one.refilled for one in complete), Counter())

    @property
    def num_lines(self) -> int:
        return sum(num_lines for _, num_lines in self.files)

    def count_sources(self) -> dict[str, SourceSummary]:
        """Count the groups of each known source of prompts, over all complete iterations."""
        found: dict[str, SourceSummary] = {}
        for iteration in self.iterations:
            for name, summary in iteration.sources.items():
                if name and iteration.outcome == "complete":
                    found.setdefault(name, SourceSummary()).add(summary)
        return dict(sorted(found.items()))

    def place(self, line: int) -> str:
        """Describe the place of a line; if the log has several files, name its file."""
        if len(self.files) == 1:
            return f"line {line}"
        for name, num_lines in self.files:
            if line <= num_lines:
                return f"line {line} of {name}"
            line -= num_lines
        return f"line {line} after the last"
