"""The protobuf messages of Tinker's interface, by the classes of its own SDK, as the front's types and back."""

import functools
import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_rl.errors import InputError, PlatformError
from megatron_rl.shared.protocol.wire import Response
from megatron_rl.tinker.losses import WEIGHTS
from megatron_rl.tinker.provenance import Claims, TokenClaim
from megatron_rl.tinker.work import Datum

_DTYPES = {1: "<f4", 2: "<i8", 3: "<i4"}
_TARGETS = "target_tokens"
_MOST_ELEMENTS, _MOST_TOKEN = 1 << 26, (1 << 31) - 1
MEDIA_TYPE = "application/x-protobuf"


@functools.cache
def load_messages() -> Any:
    """Import the classes of the SDK, with which the interface's own fields change."""
    try:
        return importlib.import_module("tinker.proto.tinker_public_pb2")
    except ImportError as error:
        raise PlatformError(
            f"--stage serve needs the package tinker ({error}): pip install 'megatron_rl[tinker]'"
        ) from None


class PassRequest(NamedTuple):
    data: list[Datum]
    claims: list[Claims]
    loss: str
    settings: dict[str, float]
    is_forward_only: bool
    trailing: list[int]
    """The shape of the targets of a position: none, or how many there are."""


def read_pass(body: bytes, inputs_of: Mapping[str, Sequence[str]]) -> PassRequest:
    """Read a ForwardBackwardRequest; `inputs_of` has the names of each loss's inputs."""
    request = _parse(body)
    settings = {
        name: value.number
        for name, value in request.loss_fn_config_v2.items()
        if value.WhichOneof("value") in ("number", None)
    } or dict(request.loss_fn_config)
    if request.loss_fn not in inputs_of:
        raise InputError(f"the loss {request.loss_fn!r} is not served; these are: {', '.join(inputs_of)}")
    inputs = inputs_of[request.loss_fn]
    data = [_read_datum(number, one, inputs, request.forward_only) for number, one in enumerate(request.data)]
    claims = [
        Claims(_read_claims(one.model_input_spans), _read_claims(one.loss_fn_input_spans)) for one in request.data
    ]
    if not data or len({one.width for one in data}) > 1:
        raise InputError(
            "a request has at least one datum, and all have as many targets a position: send each kind alone"
        )
    # One target a position may have an axis or none: of both in a request, the answer has none.
    trailing = min(list(one.loss_fn_inputs[_TARGETS].shape[1:]) for one in request.data)
    return PassRequest(data, claims, request.loss_fn, settings, request.forward_only, trailing)


def read_place(body: bytes) -> tuple[str, int]:
    """Read the model and the number of a request of which the rest may be wrong."""
    request = _parse(body)
    return request.model_id, request.seq_id


def _parse(body: bytes) -> Any:
    request = load_messages().ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except Exception as error:
        raise InputError(f"the body is not a ForwardBackwardRequest: {error}") from None
    return request


def _read_datum(number: int, datum: Any, inputs: Sequence[str], is_forward_only: bool) -> Datum:
    chunks = []
    for chunk in datum.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise InputError(f"datum {number}: only chunks of tokens are served, not {chunk.WhichOneof('chunk')}")
        chunks.append(chunk.encoded_text.tokens)
    tokens = b"".join(chunks)
    if len(tokens) % 4:
        raise InputError(f"datum {number} has {len(tokens)} bytes of tokens, and each is an int32")
    length = len(tokens) // 4
    values = {name: _read_tensor(number, name, tensor) for name, tensor in datum.loss_fn_inputs.items()}
    if _TARGETS not in values:
        raise InputError(f"datum {number} has no {_TARGETS}")
    targets = values.pop(_TARGETS)
    if not length or targets.ndim not in (1, 2) or len(targets) != length:
        raise InputError(
            f"datum {number} has {length} tokens of input and {_TARGETS} of the shape {list(targets.shape)}: send one "
            "row for each token"
        )
    if targets.min() < 0 or targets.max() > _MOST_TOKEN:
        raise InputError(f"datum {number}: {_TARGETS} has {targets.min()} to {targets.max()}, which are not tokens")
    found = {}
    for name in inputs:
        if name not in values and name != WEIGHTS and not is_forward_only:
            raise InputError(f"datum {number} has no {name}, which this loss reads")
        # All targets have the same weight if a client gives none.
        value = values.get(name, np.full(targets.shape, float(name == WEIGHTS), "<f4"))
        if value.shape != targets.shape:
            raise InputError(
                f"datum {number}: {name} has the shape {list(value.shape)}, and {_TARGETS} {list(targets.shape)}"
            )
        if not np.isfinite(value).all():
            raise InputError(f"datum {number}: {name} has values that are not finite")
        found[name] = value.astype("<f4").tobytes()
    width = 1 if targets.ndim == 1 else targets.shape[1]
    return Datum(tokens, targets.astype("<i4").tobytes(), found, width)


def _read_tensor(number: int, name: str, tensor: Any) -> np.ndarray:
    dtype, shape = _DTYPES.get(tensor.dtype), tuple(tensor.shape)
    if math.prod(shape) > _MOST_ELEMENTS:
        raise InputError(f"datum {number}: {name} has the shape {list(shape)}, and at most {_MOST_ELEMENTS} elements")
    if dtype is None:
        raise InputError(f"datum {number}: {name} has an element type that is not served; send float32 or int64")
    try:
        if tensor.WhichOneof("encoding") != "sparse_csr":
            return np.frombuffer(tensor.dense, dtype).reshape(shape)
        values, rows, columns = (
            np.frombuffer(one, kind)
            for one, kind in (
                (tensor.sparse_csr.values, dtype),
                (tensor.sparse_csr.crow_indices, "<i8"),
                (tensor.sparse_csr.col_indices, "<i8"),
            )
        )
        dense = np.zeros(shape, dtype)
        dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
        return dense
    except (ValueError, IndexError) as error:
        raise InputError(
            f"datum {number}: {name} does not have the shape {list(shape)} that it names: {error}"
        ) from None


def _read_claims(spans: Any) -> tuple[TokenClaim, ...]:
    found = []
    for span in spans:
        kind = span.WhichOneof("span") or "prompt_tokens"
        run = getattr(span, kind)
        found.append(TokenClaim(run.sequence_id, kind == "sampled_tokens", run.offset, run.length))
    return tuple(found)


def write_pass(trailing: Sequence[int], log_probs: Sequence[bytes], metrics: Mapping[str, float]) -> bytes:
    """Write a ForwardBackwardOutput with the log-probs of each datum's targets, in their shape."""
    output = load_messages().ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(metrics))
    offsets = np.cumsum([0, *map(len, log_probs)], dtype="<i8")
    tensor = load_messages().BatchedTensor(
        data=b"".join(log_probs), offsets=offsets.tobytes(), dtype=1, trailing_shape=trailing
    )
    record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(log_probs))
    record.fields["logprobs"].CopyFrom(tensor)
    return output.SerializeToString()


def write_samples(responses: Sequence[Response], prompt_log_probs: np.ndarray | None) -> bytes:
    """Write a SampleResponse; prompt's log-probs begin with NaN, since nothing predicts its first token."""
    answer = load_messages().SampleResponse()
    for response in responses:
        answer.sequences.add(
            stop_reason=int(response.finish_reason == "length"), tokens=response.tokens, logprobs=response.log_probs
        )
    if prompt_log_probs is not None:
        answer.prompt_logprobs = prompt_log_probs.astype("<f4").tobytes()
    return answer.SerializeToString()
