"""The messages between trainer, sidecar and engines: typed, versioned, MessagePack or JSON, no pickle.

Arrays travel as little-endian bytes.
"""

import enum
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from megatron_rl.errors import InputError

WIRE_VERSION = 11
MEDIA_TYPE = "application/vnd.megatron-rl+msgpack"

T = TypeVar("T")

# vLLM raises a lower temperature to this one, and says so only in its log.
LEAST_TEMPERATURE = 0.01

FinishReason = Literal["stop", "length", "cut", "limit", "failed"]
"""`cut`: cut off before its end, by `Plan.tail`. `limit`: the environment had more to say, and no turn or no token was
left for an answer. `failed`: the environment failed."""
Cause = Literal["", "raised", "timeout", "process", "no reward", "dropped"]
"""The cause of a failure that is not the policy's. `raised`: by the environment, agent or its server. `timeout`: its
time was used up. `process`: its process ended. `no reward`: no function gave one. `dropped`: it is the only scored one
of its group. Empty without a failure."""
Order = Literal["completion", "prompt"]
Proof = Literal["digests", "probe"]
"""The proof that engines hold a version, as docs/audit.md describes it."""
Tail = Literal["stop", "truncate", "carry"]
"""The treatment of the last groups of an iteration, as docs/rollout.md describes it."""
Way = Literal["files", "ipc", "stream"]
"""The way in which weights reach engines: files, the memory of the trainer's devices, or a stream between devices."""
JSON = dict[str, Any]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sampling parameters. Options that make the sampled policy differ from the trained one are left out."""

    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    min_tokens: int = 0
    max_turns: int = 0
    """The most turns of the policy in a response, between which an environment writes; 0: no environment."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of the data: its place in the iteration, its tokens, and the columns that rewards need."""

    index: int
    row: str
    """The identity of the row in its data set, for logs."""
    tokens: bytes
    text: str | list[JSON] = ""
    """The prompt as plain text or chat messages."""
    columns: JSON = {}


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The division of an iteration's groups into slots; the same on every rank of the trainer and in the sidecar."""

    num_prompts: int
    group_size: int
    num_replicas: int
    micro_batch_size: int
    """The responses of a slot: a multiple of the group size, or a divisor of it that splits a group."""
    num_updates: int = 1
    order: Order = "completion"
    num_spare: int = 0
    """The prompts beyond `num_prompts`, for groups without a signal; 0: every group is trained on."""
    deciding_rewards: list[str] = []
    """The reward functions that decide: one of them must differ within a group that has a signal. If empty, the sum."""
    least_reward: float | None = None
    """The lower bound that rewards are clipped to."""
    largest_reward: float | None = None
    """The upper bound that rewards are clipped to."""
    tail: Tail = "stop"
    num_tail: int = 0
    """The most groups that are cut off, or the number of groups that are put off."""

    def count_submitted(self, num_carried: int = 0) -> int:
        """Count the prompts that are submitted: those that are trained on, and those that may take their places."""
        is_tailed = self.tail == "carry" and not num_carried
        return self.num_prompts + self.num_spare + (self.num_tail if is_tailed else 0)

    def count_carried(self, num_put_off: int) -> int:
        """Count the prompts that an iteration must begin with because earlier ones have put them off.

        With the tail `carry` they are gathered until they fill an iteration of their own.
        """
        if self.tail == "carry" and num_put_off < self.num_prompts:
            return 0
        return min(num_put_off, self.num_prompts)


class Submission(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An iteration: prompts, and the version of the policy that samples responses to them."""

    wire: int = WIRE_VERSION
    run: str
    version: int
    fingerprint: str
    plan: Plan
    sampling: Sampling
    prompts: list[Prompt]
    """The prompts that earlier iterations put off, then those of the plan, then the spare ones."""
    deadline_seconds: float
    num_carried: int = 0
    """The number of prompts that earlier iterations put off: they are trained on now."""

    def __post_init__(self) -> None:
        _check_sampling(self.sampling, self.deadline_seconds, is_greedy_allowed=False)

    @property
    def group_size(self) -> int:
        return self.plan.group_size


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompts that a version is evaluated on and never trained on; temperature 0 is greedy."""

    wire: int = WIRE_VERSION
    run: str
    version: int
    fingerprint: str
    prompts: list[Prompt]
    group_size: int
    sampling: Sampling
    deadline_seconds: float

    def __post_init__(self) -> None:
        _check_sampling(self.sampling, self.deadline_seconds, is_greedy_allowed=True)
        if not self.prompts or [prompt.index for prompt in self.prompts] != list(range(len(self.prompts))):
            raise InputError(
                f"an evaluation of {len(self.prompts)} prompts must have at least one, and indices 0, 1, 2, ..."
            )
        if self.group_size < 1:
            raise InputError(f"group_size {self.group_size} of an evaluation must be at least 1")
        if self.sampling.temperature == 0 and self.group_size > 1:
            raise InputError(
                f"group_size {self.group_size} at temperature 0: greedy responses to one prompt are equal; "
                f"ask for 1, or for a temperature of at least {LEAST_TEMPERATURE}"
            )


class VersionSpan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The version under which tokens [start, end) of a response were sampled, or `turns.ENVIRONMENT`."""

    version: str
    start: int
    end: int
    engine: str = ""
    """The engine that sampled them, if it is not the response's."""


class Branch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a response that does not follow the token before it.

    Tokens are counted as in spans, and those of the prompt from its end: -1 is its last one. A branch ends where the
    next one begins, and no span reaches over its ends.
    """

    start: int
    """Its first token."""
    after: int
    """Its first token follows token `after - 1`, and all that this one follows; no token if the prompt begins there."""


class Response(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sampled completion with its provenance."""

    tokens: bytes
    log_probs: bytes
    """The log-probs of the tokens under the sampling distribution, at the sampling temperature; float32.

    They are 0 for tokens that an environment wrote.
    """
    teacher_log_probs: bytes | msgspec.UnsetType = msgspec.UNSET
    """The log-probs of the tokens under a teacher that engines compute, at temperature 1; otherwise as `log_probs`."""
    teacher_hash: str | msgspec.UnsetType = msgspec.UNSET
    """The hash of that teacher's folder."""
    finish_reason: FinishReason
    seed: int
    engine: str
    spans: list[VersionSpan]
    branches: list[Branch] = []
    """The parts that do not follow the token before them, in order; without any it follows the prompt as one chain."""
    fingerprint: str
    """The fingerprint of the weights that sampled it, as the engine digested them."""
    reward: float | None = 0.0
    """None if it is not scored, for its cause: it is not trained on, and does not count in its group."""
    turn_rewards: list[float] = []
    """The environment's reward for each turn of the policy, in order, which `reward` contains; empty without them."""
    components: dict[str, float | None] = {}
    failure: str = ""
    """The reason of its environment's or agent's failure; empty without one."""
    cause: Cause = ""
    refilled: tuple[Cause, ...] = ()
    """The causes of failures after which it was sampled again; its seed follows from the first one and their number."""
    experts: bytes | msgspec.UnsetType = msgspec.UNSET
    """The experts of each token but the last, which the engine was not fed, as `encode_experts` encodes them."""
    prompt_experts: bytes | msgspec.UnsetType = msgspec.UNSET
    """Those of the prompt's tokens, in the first response of a group alone."""


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt with all its responses, finished and scored."""

    prompt: Prompt
    responses: list[Response]


class Evaluated(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer to an evaluation: a group for each prompt, in the order of the prompts."""

    wire: int = WIRE_VERSION
    run: str
    version: int
    fingerprint: str
    groups: list[Group]
    figures: dict[str, float] | str | msgspec.UnsetType = msgspec.UNSET
    """The figures of --eval-command, or the reason why there are none."""


class Unscored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The remains of a response that is not scored."""

    cause: Cause
    failure: str
    refilled: tuple[Cause, ...] = ()


class GroupPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The scored responses of a group, or those in one slot; `rewards` and `components` belong to the whole group."""

    prompt_index: int
    row: str
    prompt_tokens: bytes
    begins: bool = True
    """True for the first part of its group."""
    first_response: int
    """The place of its first response in `rewards`."""
    responses: list[Response]
    unscored: list[Unscored] = []
    """The responses of this part that are not scored."""
    rewards: list[float]
    turn_rewards: list[list[float]] = []
    """The rewards of each response's turns, which add up to its reward; empty without an environment."""
    components: dict[str, list[float | None]] = {}
    prompt_experts: bytes | msgspec.UnsetType = msgspec.UNSET
    """The experts of the prompt's tokens."""
    teacher: str | None = None
    """The text in the prompt's column `teacher`."""


class Slot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer to a request for a slot: the groups of one micro-batch of one replica, perhaps none."""

    wire: int = WIRE_VERSION
    run: str
    version: int
    fingerprint: str
    replica: int
    index: int
    parts: list[GroupPart]


Transport = Literal["shm", "nccl", "hccl"]
"""The transport of weights to engines, as docs/rollout.md describes it."""


BUFFER_BYTES, NUM_BUFFERS = 1 << 28, 2
"""The size and the number of the buffers in which tensors are streamed to engines; the last tensor may exceed it."""
STREAM_BUFFERS: dict[str, Any] = {
    "packed": True, "packed_buffer_size_bytes": BUFFER_BYTES, "packed_num_buffers": NUM_BUFFERS,
}  # fmt: skip
"""vLLM's settings of both ends of a stream over NCCL: tensors travel in buffers."""


class FileSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="files"):
    """Weights in safetensors files, which engines may read while they are written."""

    folder: str


class StreamSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="stream"):
    """Weights that rank 0 of the trainer sends to all workers of engines, in a group that it opens."""

    transport: Literal["nccl", "hccl"]
    address: str
    """The host:port at which rank 0 opens the group."""
    manifest: list[tuple[str, str, list[int]]]
    """The names, dtypes and shapes in the order in which they are sent; files carry their own."""
    world_size: int
    """The size of the group: rank 0 and all workers of engines."""


class Weights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A version of the policy, and the source from which engines load it."""

    wire: int = WIRE_VERSION
    run: str
    version: int
    fingerprint: str
    source: FileSource | StreamSource
    dtype: str
    base: str = ""
    """The fingerprint of the base, if only adapters come: `fingerprint` covers both. Empty for whole weights."""
    probe: bytes = b""
    """The tokens whose log-probs the trainer sends in a `ProbeAnswer`, for which the publish waits; may be empty."""
    deadline_seconds: float | None = None
    """Seconds that engines may load, and that the trainer may compute the probe; the sidecar's own bounds if None."""
    proof: Proof = "digests"

    @property
    def is_streamed(self) -> bool:
        return isinstance(self.source, StreamSource)

    @property
    def stream(self) -> StreamSource:
        assert isinstance(self.source, StreamSource)
        return self.source

    @property
    def folder(self) -> str:
        assert isinstance(self.source, FileSource)
        return self.source.folder


class EngineKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine's way of computing log-probs, which decides how far they may be from the trainer's."""

    dtype: str = "float32"
    device: str = "cpu"
    is_quantized: bool = False
    has_experts: bool = False
    """Rounding decides between experts that score almost alike, so log-probs differ more."""
    has_model: bool = True
    """False for scripted engines, which draw tokens at random: their log-probs cannot be compared."""


class PublishAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer to a publish: the engines' kind, and the number of parameters that were compared."""

    kind: EngineKind = EngineKind()
    """The coarsest kind among the engines."""
    num_compared: int = 0
    """The parameters proved to hold what was published, bit for bit, in the engine with the fewest of them."""
    num_parameters: int = 0
    through: Way = "files"
    """The way in which weights reached the engines; "ipc" only if it is that of all engines."""
    reasons: tuple[str, ...] = ()
    """The reasons why an engine that was offered the devices' memory took files."""


class ProbeAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trainer's log-probs of a version's probe; the engines' must be within a bound of them."""

    wire: int = WIRE_VERSION
    run: str
    version: int
    fingerprint: str
    log_probs: bytes
    dtype: str
    """The precision that the trainer computes in."""
    bound: float | None = None
    """The largest mean difference accepted; if None, it follows from the precisions."""
    agreement: float | None = None
    """The largest mean difference between engines accepted; if None, it follows from their precisions and devices."""


class Mismatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The distance between the trainer's log-probs of an iteration's tokens and those of their sampling."""

    mean: float
    largest: float
    bound: float | None
    """The largest mean that is accepted; None if tokens were drawn at random."""
    num_differing: int = 0
    """The tokens whose log-probs are not equal to the last bit."""
    without_replay: float | msgspec.UnsetType = msgspec.UNSET
    """The mean over some of the tokens with the experts that the trainer's routers choose; unset if not measured."""

    @property
    def is_accepted(self) -> bool:
        """True within the bound; NaN is not accepted."""
        return self.bound is None or self.mean <= self.bound


class Census(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The outcome of an iteration's prompts: more are sampled than trained on if groups may have no signal."""

    num_considered: int
    """The number of first prompts that decided the selection; those after them are still to be taken."""
    num_without_signal: int
    """The considered groups in which no deciding reward differs."""
    reward: float
    """The mean clipped reward of the considered groups, those without a signal included; 0 if none is scored."""
    put_off: list[int] = []
    """The considered prompts that a later iteration is to train on."""
    rewards: list[float | None] = []
    """The mean clipped reward of each considered group; None for one that was put off or is not scored."""


class EnvironmentTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds in which environments answered the turns of an iteration's conversations."""

    mean: float
    p95: float
    """The seconds that 95 % of the answers did not exceed."""


class Drafts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of drafts of tokens that engines checked (--rollout-speculative)."""

    count: int = 0
    """The number of drafts: a response gets the accepted tokens of a draft, and one more."""
    drafted: int = 0
    """The number of their tokens."""
    accepted: int = 0
    """The number of tokens that were accepted."""

    def __add__(self, other: "Drafts") -> "Drafts":
        return Drafts(
            count=self.count + other.count,
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
        )

    def __sub__(self, other: "Drafts") -> "Drafts":
        return self + Drafts(count=-other.count, drafted=-other.drafted, accepted=-other.accepted)


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """The answer when an iteration is complete."""

    version: int
    head: str
    """The hash of the audit log's last line."""
    line: int
    """The number of that line."""
    census: Census
    num_in_flight: int | None = None
    """The most responses that each engine was given at once, if the sidecar knows it."""
    environments: EnvironmentTimes | None = None
    """The times of environments; None without any."""
    drafts: Drafts | None = None
    """The drafts of all engines since the version was published; None if no engine drafts."""


class Trained(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The report that the trainer has trained on an iteration, or refuses to, with the mismatch that it measured."""

    wire: int = WIRE_VERSION
    version: int
    mismatch: Mismatch
    plug_ins: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    """The sha256 of the file of each user-defined function that was trained with, by its flag; unset if none."""
    objective: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    """The values of the objective's flags, and the hashes of the files that they name."""
    seconds: float | msgspec.UnsetType = msgspec.UNSET
    """The seconds for which the trainer computed that can overlap with sampling; 0 if it waits for all groups first."""


class ErrorCode(enum.StrEnum):
    """Errors of the sidecar that the trainer tells apart, as they travel: classes may be renamed."""

    REFUSED = "refused"
    ITERATION_FAILED = "iteration failed"
    EVALUATION_FAILED = "evaluation failed"
    WORKERS_CHANGED = "workers changed"


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request that failed, as JSON."""

    error: str
    code: ErrorCode = ErrorCode.REFUSED


def encode(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """Decode a message; an InputError names the field that does not fit."""
    try:
        message = msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # Another version has other fields.
        check_version(_read_version(data), "the message")
        raise InputError(f"not a {kind.__name__} of wire version {WIRE_VERSION}: {error}") from None
    check_version(getattr(message, "wire", WIRE_VERSION), "the message")
    return message


def check_version(version: int, of: str) -> None:
    """Raise an InputError unless this is the wire version of this side."""
    if version != WIRE_VERSION:
        raise InputError(
            f"the wire version of {of} is {version}, and this side speaks {WIRE_VERSION}: install the same "
            "megatron_rl on both"
        )


class _WireVersion(msgspec.Struct):
    wire: int = WIRE_VERSION


def _read_version(data: bytes) -> int:
    """Return the wire version of a message that may have unknown fields; this side's if it says none."""
    try:
        return msgspec.msgpack.decode(data, type=_WireVersion).wire
    except (msgspec.DecodeError, UnicodeDecodeError):
        return WIRE_VERSION


def encode_json(message: msgspec.Struct) -> bytes:
    """Encode a message that people may read, as JSON; it may hold dataclasses and paths."""
    return msgspec.json.format(msgspec.json.encode(message, enc_hook=_encode_path), indent=2) + b"\n"


def decode_json(data: bytes, kind: type[T]) -> T:
    """Decode a message of `encode_json`; an InputError names the field that does not fit.

    msgspec ignores unknown fields of dataclasses, so they are looked for afterwards.
    """
    try:
        given = msgspec.json.decode(data)
        # Before the fields: another version may have others.
        check_version(given.get("wire", WIRE_VERSION) if isinstance(given, dict) else WIRE_VERSION, "the message")
        message = msgspec.convert(given, kind, dec_hook=_decode_path)
    except msgspec.DecodeError as error:
        raise InputError(f"not a {kind.__name__} of wire version {WIRE_VERSION}: {error}") from None
    _check_known_fields(given, msgspec.to_builtins(message, enc_hook=_encode_path), kind.__name__)
    return message


def _check_known_fields(given: Any, known: Any, place: str) -> None:
    """Raise an InputError if a field was given that is not known, at any depth."""
    if isinstance(given, dict) and isinstance(known, dict):
        if unknown := sorted(given.keys() - known.keys()):
            raise InputError(
                f"the field {unknown[0]} of {place} is unknown: install the same megatron_rl on both sides"
            )
        for name, value in given.items():
            _check_known_fields(value, known[name], f"{place}.{name}")


def _encode_path(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value).__name__)


def _decode_path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(kind.__name__)


def _check_sampling(sampling: Sampling, deadline_seconds: float, is_greedy_allowed: bool) -> None:
    """Refuse, by name, values that an engine would silently replace."""
    temperature = sampling.temperature
    is_greedy = is_greedy_allowed and temperature == 0
    if not (is_greedy or LEAST_TEMPERATURE <= temperature < math.inf):
        greedy = ", or 0 for greedy" if is_greedy_allowed else "; only evaluations may be greedy"
        raise InputError(
            f"temperature {temperature:g} must be finite and at least {LEAST_TEMPERATURE}, because engines raise lower "
            f"ones to that{greedy}"
        )
    if sampling.max_tokens < 1:
        raise InputError(f"max_tokens {sampling.max_tokens} must be at least 1")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise InputError(
            f"min_tokens {sampling.min_tokens} must be from 0 to max_tokens, which is {sampling.max_tokens}"
        )
    if sampling.max_turns < 0:
        raise InputError(f"max_turns {sampling.max_turns} must be at least 1, or 0 for no environment")
    if not 0 < deadline_seconds < math.inf:
        raise InputError(f"deadline_seconds {deadline_seconds:g} must be finite and above 0")


def encode_tokens(tokens: Sequence[int] | np.ndarray) -> bytes:
    return np.asarray(tokens, dtype="<i4").tobytes()


def decode_tokens(data: bytes) -> np.ndarray:
    """Decode what `encode_tokens` encoded, without a copy."""
    return np.frombuffer(data, dtype="<i4")


def encode_log_probs(log_probs: Sequence[float] | np.ndarray) -> bytes:
    return np.asarray(log_probs, dtype="<f4").tobytes()


def decode_log_probs(data: bytes) -> np.ndarray:
    """Decode what `encode_log_probs` encoded, without a copy."""
    return np.frombuffer(data, dtype="<f4")


def encode_experts(experts: np.ndarray) -> bytes:
    """Encode the numbers of experts, of tokens x layers x experts of a token: a byte each, or two if they need it."""
    return experts.astype("<u1" if experts.dtype.itemsize == 1 else "<u2", copy=False).tobytes()


def decode_experts(data: bytes, num_experts: int) -> np.ndarray:
    """Decode what `encode_experts` encoded for a model with this number of experts, without a copy."""
    return np.frombuffer(data, dtype="<u1" if num_experts <= 256 else "<u2")
