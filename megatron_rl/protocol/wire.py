"""What crosses the boundary between trainer, sidecar and engines: typed, versioned, MessagePack, no pickle.

Arrays travel as little-endian bytes; `decode_tokens` and `decode_log_probs` give them back without a copy.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from megatron_rl.errors import InputError

WIRE_VERSION = 1
MEDIA_TYPE = "application/vnd.megatron-rl+msgpack"

T = TypeVar("T")

# vLLM samples with this where less is asked for, and says so in its log only.
LEAST_TEMPERATURE = 0.01

FinishReason = Literal["stop", "length"]
Order = Literal["completion", "prompt"]
JSON = dict[str, Any]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How responses are sampled. Whatever would make the sampled policy another than the trained one is not here."""

    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    min_tokens: int = 0


class Prompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of the data: its place in the iteration, its tokens, and what the rewards want of it."""

    index: int
    row: str
    """The identity of the row in its data set, for logs."""
    tokens: bytes
    text: str | list[JSON] = ""
    """Plain text, or chat messages."""
    columns: JSON = {}


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an iteration's groups are divided into slots; the same on every rank of the trainer and in the sidecar."""

    num_prompts: int
    group_size: int
    num_replicas: int
    micro_batch_size: int
    """Responses in a slot: a multiple of the group size, or a divisor of it that splits a group."""
    num_updates: int = 1
    order: Order = "completion"


class Submission(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An iteration: the prompts whose responses version `version` of the policy is to sample."""

    wire: int = WIRE_VERSION
    run: str
    version: int
    fingerprint: str
    plan: Plan
    sampling: Sampling
    prompts: list[Prompt]
    deadline_seconds: float

    def __post_init__(self) -> None:
        _check_sampling(self.sampling, self.deadline_seconds, is_greedy_allowed=False)

    @property
    def group_size(self) -> int:
        return self.plan.group_size


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompts that version `version` of the policy is judged by, and never trained on; temperature 0 is greedy."""

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
                f"an evaluation of {len(self.prompts)} prompts: give at least one, with indices 0, 1, 2, ... in order"
            )
        if self.group_size < 1:
            raise InputError(f"group_size {self.group_size} of an evaluation: it must be at least 1")
        if self.sampling.temperature == 0 and self.group_size > 1:
            raise InputError(
                f"group_size {self.group_size} at temperature 0: greedy responses to one prompt are all the same; "
                f"ask for 1, or for a temperature of at least {LEAST_TEMPERATURE}"
            )


class Span(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens [start, end) of a response were sampled under this version."""

    version: str
    start: int
    end: int


class Response(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sampled completion with its provenance."""

    tokens: bytes
    log_probs: bytes
    """Of each token under the sampling distribution, at the sampling temperature; fp32."""
    finish_reason: FinishReason
    seed: int
    engine: str
    spans: list[Span]
    fingerprint: str
    """What the engine digested of the weights it sampled with."""
    reward: float = 0.0
    components: dict[str, float | None] = {}


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


class GroupPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group, or the part of it that one slot holds; `rewards` are those of the whole group."""

    prompt_index: int
    row: str
    prompt_tokens: bytes
    first_response: int
    responses: list[Response]
    rewards: list[float]


class Slot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer to a slot request: the groups of one micro-batch of one replica; none for an empty one."""

    wire: int = WIRE_VERSION
    run: str
    version: int
    fingerprint: str
    replica: int
    index: int
    parts: list[GroupPart]


class Weights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A version of the policy as a transport delivers it to engines."""

    wire: int = WIRE_VERSION
    run: str
    version: int
    fingerprint: str
    transport: Literal["shm", "nccl", "hccl"]
    dtype: str
    location: str = ""
    """shm: the folder that holds the safetensors files. nccl, hccl: the master's host:port."""
    manifest: list[tuple[str, str, list[int]]] = []
    """Names, dtypes and shapes in the order in which a stream sends them; a file carries its own."""
    world_size: int = 0
    """nccl, hccl: of the group that the trainer opens, itself and all workers of engines."""
    probe: bytes = b""
    """Tokens whose log-probs the trainer sends too, in a `ProbeAnswer`; engines wait for it. None if it does not."""


class EngineKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine computes log-probs: what they may differ by from the trainer's follows from it."""

    dtype: str = "float32"
    device: str = "cpu"
    is_quantized: bool = False
    has_experts: bool = False
    """Where two are chosen almost alike, rounding decides."""
    has_model: bool = True
    """False where tokens are drawn by chance: then nothing can be compared."""


class ProbeAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trainer's own log-probs of a version's probe, from which engines' must not differ by more than a bound."""

    wire: int = WIRE_VERSION
    run: str
    version: int
    fingerprint: str
    log_probs: bytes
    dtype: str
    """What the trainer computes in."""
    bound: float | None = None
    """Of the mean difference; by precision if not given."""


class Mismatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far the trainer's log-probs were from those that an iteration's tokens were sampled with."""

    mean: float
    largest: float
    bound: float | None
    """Of the mean; none where tokens were sampled by chance."""

    @property
    def is_borne(self) -> bool:
        """Written so that what is not a number is not."""
        return self.bound is None or self.mean <= self.bound


class Trained(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trainer has trained on an iteration, or has refused to, because of what it measured."""

    wire: int = WIRE_VERSION
    version: int
    mismatch: Mismatch


def encode(message: msgspec.Struct) -> bytes:
    """The bytes of a message."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """The message in the bytes; an InputError that names the field when they are something else."""
    try:
        message = msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"not a {kind.__name__} of wire version {WIRE_VERSION}: {error}") from None
    wire = getattr(message, "wire", WIRE_VERSION)
    if wire != WIRE_VERSION:
        raise InputError(f"wire version {wire}, this side speaks {WIRE_VERSION}: install the same megatron_rl on both")
    return message


def _check_sampling(sampling: Sampling, deadline_seconds: float, is_greedy_allowed: bool) -> None:
    """An InputError that names the value, for what an engine would quietly take for something else."""
    temperature = sampling.temperature
    is_greedy = is_greedy_allowed and temperature == 0
    if not (is_greedy or LEAST_TEMPERATURE <= temperature < math.inf):
        greedy = ", or 0 for greedy" if is_greedy_allowed else "; only evaluations may be greedy"
        raise InputError(
            f"temperature {temperature:g}: write a finite one of at least {LEAST_TEMPERATURE}, since engines sample "
            f"with that where less is asked for{greedy}"
        )
    if sampling.max_tokens < 1:
        raise InputError(f"max_tokens {sampling.max_tokens}: it must be at least 1")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise InputError(
            f"min_tokens {sampling.min_tokens}: it must be from 0 to max_tokens, which is {sampling.max_tokens}"
        )
    if not 0 < deadline_seconds < math.inf:
        raise InputError(f"deadline_seconds {deadline_seconds:g}: it must be above 0, and finite")


def encode_tokens(tokens: Sequence[int] | np.ndarray) -> bytes:
    """Tokens as they travel."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def decode_tokens(data: bytes) -> np.ndarray:
    """Tokens that travelled."""
    return np.frombuffer(data, dtype="<i4")


def encode_log_probs(log_probs: Sequence[float] | np.ndarray) -> bytes:
    """Log-probs as they travel."""
    return np.asarray(log_probs, dtype="<f4").tobytes()


def decode_log_probs(data: bytes) -> np.ndarray:
    """Log-probs that travelled."""
    return np.frombuffer(data, dtype="<f4")
