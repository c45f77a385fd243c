"""The events of an audit log, each with fields of its own."""

from collections.abc import Mapping
from typing import Any

import msgspec

from megatron_rl.shared.protocol.wire import WIRE_VERSION, Cause, Plan, Proof, Sampling

FILE_NAME = "audit.jsonl"


class AuditEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """An event of a run; each kind of event has its own fields and tag."""


class Start(AuditEvent, frozen=True, kw_only=True, tag="start"):
    """A sidecar opened the log."""

    run: str
    wire: int = WIRE_VERSION
    details: dict[str, Any] = {}


class Recovered(AuditEvent, frozen=True, kw_only=True, tag="recovered"):
    """A kill had torn the last line, whose bytes were cut off."""

    num_bytes: int


class Continued(AuditEvent, frozen=True, kw_only=True, tag="continued"):
    """The first line of every file but the first: the chain continues here."""

    file: int


class ProbeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The differences between the log-probs that engine and trainer give to the tokens of the probe."""

    mean: float
    largest: float
    bound: float | None
    """Largest accepted mean; None without a bound, since JSON cannot write infinity."""


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """The weights that an engine reports to hold, and the proof of them."""

    engine: str
    version: int
    fingerprint: str
    compared: int = 0
    """Number of parameters that were compared, bit for bit, with the received weights."""
    parameters: int = 0
    """Number of all parameters."""
    probe: ProbeRecord | None = None
    """Comparison of its log-probs with the trainer's; None if it was not made."""
    quantization: str | msgspec.UnsetType = msgspec.UNSET
    """Names of what the engine quantizes; unset if it computes with the numbers that it is given."""


class Publish(AuditEvent, frozen=True, kw_only=True, tag="publish"):
    """These engines hold a version; repeated, with the same fingerprint, when an engine joins or comes back."""

    version: int
    fingerprint: str
    engines: list[EngineReport]
    proof: Proof | None
    """Weakest proof that the run accepts; None if their responses alone say which version engines hold."""
    base: str | msgspec.UnsetType = msgspec.UNSET
    """Fingerprint of the base that engines hold, if only adapters came: `fingerprint` covers both."""


class NotProven(AuditEvent, frozen=True, kw_only=True, tag="not_proven"):
    """An engine was proved not to hold the version that it reported; nothing was sampled with it."""

    version: int
    fingerprint: str
    engine: str
    reason: str


class MismatchMeasured(AuditEvent, frozen=True, kw_only=True, tag="mismatch"):
    """The differences between the log-probs that trainer and engines give to an iteration's tokens."""

    version: int
    mean: float | None
    largest: float | None
    """Largest difference; as the mean, None if it is not finite."""
    bound: float | None
    """Largest accepted mean; None if a scripted engine drew the tokens at random."""
    num_differing: int
    """Tokens whose log-probs are not equal to the last bit."""
    without_replay: float | msgspec.UnsetType = msgspec.UNSET
    """Mean over some of the tokens without the experts that engines chose; unset if not measured."""


class Submit(AuditEvent, frozen=True, kw_only=True, tag="submit"):
    """An iteration begins. After a restart it begins again, and all of its groups and claims are repeated."""

    version: int
    fingerprint: str
    plan: Plan
    sampling: Sampling
    prompts: list[str]
    seeds: list[int]
    num_carried: int = 0
    """Number of prompts that earlier iterations put off; they come first."""


class SpanRecord(msgspec.Struct, frozen=True, array_like=True):
    """Version, start and end, as in `wire.VersionSpan`."""

    version: str
    start: int
    end: int
    engine: str = ""


class ResponseRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A response, with hashes of its tokens and log-probs."""

    tokens: str
    log_probs: str
    num_tokens: int
    finish_reason: str = ""
    seed: int
    engine: str
    spans: list[SpanRecord]
    branches: list[tuple[int, int]] = []
    """Its parts that do not follow the token before them: the first token of each, and the end of what it follows."""
    fingerprint: str
    reward: float | None
    """None if it is not scored, and not trained on."""
    turn_rewards: list[float] = []
    """Reward that the environment gave for each turn of the policy, in order; `reward` contains them."""
    components: dict[str, float | None] = {}
    """Rewards by function."""
    experts: str = ""
    """Hash of the experts of its tokens, in the first response those of the prompt's before them; empty without."""
    cause: Cause = ""
    """Cause of a failure that is not the policy's."""
    refilled: tuple[Cause, ...] = ()
    """Causes of the failures after which it was sampled again."""


class GroupFinished(AuditEvent, frozen=True, kw_only=True, tag="group"):
    """A group was taken into the iteration."""

    version: int
    prompt: int
    prompt_hash: str
    row: str
    """Row of the data that the prompt is, FILE:LINE."""
    is_restored: bool
    responses: list[ResponseRecord]


class SlotClaimed(AuditEvent, frozen=True, kw_only=True, tag="claim"):
    """A replica claimed these groups for a slot."""

    version: int
    replica: int
    index: int
    prompts: list[int]


class TrainedWith(AuditEvent, frozen=True, kw_only=True, tag="plug_ins"):
    """The trainer reports the user's own functions that it has trained with."""

    version: int
    sha256: dict[str, str]
    """Hashes of the functions' files, by flag."""


class ObjectiveStated(AuditEvent, frozen=True, kw_only=True, tag="objective"):
    """The trainer reports the objective that it trains with, from this version on."""

    version: int
    values: dict[str, str]
    """Values by flag, and hashes by file."""


def list_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """List the flags of an objective whose values have changed, and the files whose hashes have."""
    # A file that only one of them names shows in its flag.
    return [f"{name} {before[name]} -> {text}" for name, text in now.items() if before.get(name, text) != text]


class Complete(AuditEvent, frozen=True, kw_only=True, tag="complete"):
    """The trainer reports the groups and responses that it has trained on."""

    version: int
    num_groups: int
    num_responses: int


class Fail(AuditEvent, frozen=True, kw_only=True, tag="fail"):
    """The iteration ended without an update."""

    version: int
    reason: str


class Evaluate(AuditEvent, frozen=True, kw_only=True, tag="evaluation"):
    """A version was evaluated on prompts that are not trained on."""

    version: int
    fingerprint: str
    sampling: Sampling
    num_prompts: int
    num_responses: int
    """Number of responses that are scored."""
    mean_reward: float | None


AnyEvent = (
    Start
    | Recovered
    | Continued
    | Publish
    | NotProven
    | Submit
    | GroupFinished
    | SlotClaimed
    | MismatchMeasured
    | TrainedWith
    | ObjectiveStated
    | Complete
    | Fail
    | Evaluate
)
