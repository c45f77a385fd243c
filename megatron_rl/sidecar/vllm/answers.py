"""Checked calls to a vLLM server and its checked answers, because vLLM clamps and ignores values silently."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from megatron_rl.errors import InputError
from megatron_rl.shared.protocol.wire import (
    Response,
    Sampling,
    VersionSpan,
    decode_log_probs,
    decode_tokens,
    encode_tokens,
)
from megatron_rl.sidecar.engines import EngineRefused, GroupRequest
from megatron_rl.sidecar.vllm.routes import CUT, AdaptersName, GroupAnswer, GroupCall, GroupChoice


class Limits(msgspec.Struct, frozen=True):
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()


def build_call(request: GroupRequest, limits: Limits, tag: str, adapters: AdaptersName | None = None) -> GroupCall:
    """Build the call to vLLM, which names these adapters; raise InputError if vLLM would silently do something else."""
    _check_fits(request, limits)
    sampling = build_sampling_params(request.sampling, limits)
    return GroupCall(
        request_id=request.request_id,
        prompt=encode_tokens(request.prompt_tokens),
        sampling={**sampling, "n": request.group_size, "seed": request.seed},
        # Keys and values of other weights are never reused, even if a reset of the cache failed.
        cache_salt=tag,
        adapters=adapters,
    )


def build_sampling_params(sampling: Sampling, limits: Limits) -> dict[str, object]:
    """Set every sampling parameter of vLLM, so that none is left to its defaults."""
    stop_token_ids = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        # Without a tokenizer, vLLM does not know which tokens end a response.
        stop_token_ids |= set(limits.eos_token_ids)
    return {
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": sorted(stop_token_ids),
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "detokenize": False,
    }


def read_responses(
    answer: GroupAnswer, request: GroupRequest, engine: str, version: int, tag: str, has_experts: bool = False
) -> list[Response]:
    """Read a group's responses, with the experts of their tokens if `has_experts`.

    Raise EngineRefused if a response is missing or cut off, or if experts are missing. Spans are as vLLM recorded them.
    A span under other weights keeps their tag, and `check_group` refuses it.
    """
    choices = sorted(answer.choices, key=lambda choice: choice.index)
    if [choice.index for choice in choices] != list(range(request.group_size)):
        raise EngineRefused(
            f"engine {engine}: request {request.request_id} has choices {[choice.index for choice in choices]}, "
            f"and {request.group_size} were asked for"
        )
    responses = [_response(choice, request, engine, version, tag) for choice in choices]
    return _add_experts(responses, choices, answer, request, engine) if has_experts else responses


def _add_experts(
    responses: Sequence[Response],
    choices: Sequence[GroupChoice],
    answer: GroupAnswer,
    request: GroupRequest,
    engine: str,
) -> list[Response]:
    """Add the experts of each response's tokens, and to the first response those of the prompt's."""
    of_prompt, num_prompt = answer.prompt_experts or b"", len(request.prompt_tokens)
    num_bytes, rest = divmod(len(of_prompt), num_prompt)
    if not num_bytes or rest:
        raise EngineRefused(
            f"engine {engine}: request {request.request_id} has {len(of_prompt)} bytes of experts for the {num_prompt} "
            "tokens of its prompt"
        )
    found: list[Response] = []
    for choice, response in zip(choices, responses, strict=True):
        num_fed = len(choice.tokens) // 4 - 1
        if len(choice.experts or b"") != max(0, num_fed) * num_bytes:
            raise EngineRefused(
                f"engine {engine}: choice {choice.index} of request {request.request_id} has "
                f"{len(choice.experts or b'')} bytes of experts, and must have {num_bytes} for each of {num_fed} tokens"
            )
        prompt_experts = msgspec.UNSET if found else of_prompt
        found.append(msgspec.structs.replace(response, experts=choice.experts or b"", prompt_experts=prompt_experts))
    return found


def _response(choice: GroupChoice, request: GroupRequest, engine: str, version: int, tag: str) -> Response:
    if wrong := _find_fault(choice, request):
        raise EngineRefused(f"engine {engine}: choice {choice.index} of request {request.request_id} {wrong}")
    return Response(
        tokens=choice.tokens,
        log_probs=choice.log_probs,
        finish_reason="cut" if choice.finish_reason == CUT else choice.finish_reason,  # type: ignore[arg-type]
        seed=request.seed + choice.index,
        engine=engine,
        spans=[
            VersionSpan(version=str(version) if span.version == tag else span.version, start=span.start, end=span.end)
            for span in choice.spans or ()
        ],
        fingerprint=tag.partition(":")[2],
    )


def _find_fault(choice: GroupChoice, request: GroupRequest) -> str | None:
    """Return the fault of a choice; None if it has none."""
    num_tokens, most = len(choice.tokens) // 4, request.sampling.max_tokens
    is_cut = choice.finish_reason == CUT and request.cut is not None
    if choice.finish_reason not in ("stop", "length") and not is_cut:
        return f"was cut off: its finish reason is {choice.finish_reason!r}"
    if is_cut and not num_tokens:
        # It had not begun, so no weights sampled it; the group is sampled again.
        return None
    if not num_tokens or num_tokens > most or (choice.finish_reason == "length" and num_tokens != most):
        return f"ended by {choice.finish_reason!r} after {num_tokens} tokens, with max_tokens {most}"
    if choice.log_prob_tokens != choice.tokens or len(choice.log_probs) != len(choice.tokens):
        return f"has log-probs for {len(choice.log_prob_tokens) // 4} tokens that are not its own {num_tokens} tokens"
    log_probs = decode_log_probs(choice.log_probs)
    # A log-prob is at most 0, except for the rounding of a sum over the vocabulary. Written so that NaN is a fault.
    faulty = np.flatnonzero(~(np.isfinite(log_probs) & (log_probs <= 1e-3)))
    if len(faulty):
        token = decode_tokens(choice.tokens)[faulty[0]]
        return f"has {log_probs[faulty[0]]} for the log-prob of token {token}"
    if choice.spans is None:
        return (
            "does not say which weights sampled it: they may have changed meanwhile, and this vLLM does not record that"
        )
    return None


def _check_fits(request: GroupRequest, limits: Limits) -> None:
    tokens, most = request.prompt_tokens, request.sampling.max_tokens
    if not tokens:
        raise InputError(f"request {request.request_id} has an empty prompt")
    if most < 1 or request.group_size < 1:
        raise InputError(f"request {request.request_id} asks for {request.group_size} responses of {most} tokens")
    if len(tokens) + most > limits.max_model_len:
        raise InputError(
            f"request {request.request_id}: a prompt of {len(tokens)} tokens and {most} more exceed the engines' "
            f"{limits.max_model_len}: shorten one of them, or raise --rollout-max-model-len"
        )
    if request.group_size > limits.max_num_seqs:
        raise InputError(
            f"request {request.request_id}: {request.group_size} responses are more than the {limits.max_num_seqs} "
            "that an engine samples at a time: raise --rollout-max-num-seqs"
        )
    if min(tokens) < 0 or max(tokens) >= limits.vocab_size:
        raise InputError(
            f"request {request.request_id}: token {min(tokens) if min(tokens) < 0 else max(tokens)} of the prompt is "
            f"not one of the model's {limits.vocab_size}: tokenize with the model's own tokenizer"
        )


def is_sum(parts: Iterable[Sequence[int]], whole: Sequence[int]) -> bool:
    """Check whether the digests of parts add up to the digest of the whole, lane by lane."""
    return all((sum(lanes) - total) % 2**64 == 0 for *lanes, total in zip(*parts, whole, strict=True))


def find_wrongly_shared(answers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Find tensors that are divided over workers, and whose parts do not add up to the given tensor.

    Each answer has, under `shares`, the digest of the whole tensor and those of the rectangles that its worker holds.
    Several workers may hold the same rectangle.
    """
    parts: dict[str, dict[tuple[int, ...], list[int]]] = {}
    wholes: dict[str, list[int]] = {}
    for answer in answers:
        for name, share in answer["shares"].items():
            wholes.setdefault(name, share["whole"])
            for rectangle, lanes in share["parts"]:
                known = parts.setdefault(name, {}).setdefault(tuple(rectangle), lanes)
                if known != lanes:
                    yield name
    for name, of_tensor in parts.items():
        if not is_sum(of_tensor.values(), wholes[name]):
            yield name
