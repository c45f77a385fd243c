"""OpenAI's completions, of a text or of token ids: requests as calls, and answers as their clients read them."""

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_rl.gateway import fields
from megatron_rl.gateway.openai_calls import IGNORED, take_number, write_error, write_event, write_usage
from megatron_rl.gateway.said import MODEL, Answer, Call, CallRefused, Serving
from megatron_rl.tool_calls import JSON

__all__ = ["read_call", "stream_answer", "write_answer", "write_error"]

_READ = {"prompt", "model", "max_tokens", "stream", "stream_options", "logprobs", "temperature", "stop", "n"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {"echo": (False,), "best_of": (1,), "suffix": ("",)}


def read_call(body: JSON, serving: Serving) -> Call:
    """Read a request; raise CallRefused with all fields that cannot be served."""
    refusals = fields.Refusals(serving)
    refusals.check_fields(body, _READ, IGNORED, _NEUTRAL)
    refusals.read(fields.check_model, body)
    refusals.check_temperature(body)
    options = refusals.read(fields.take, body, "stream_options", dict) or {}
    call = Call(
        messages=[],
        tools=[],
        prompt=refusals.read(_read_prompt, body),
        max_tokens=refusals.read(fields.take_bound, body, "max_tokens"),
        is_streamed=bool(refusals.read(fields.take, body, "stream", bool)),
        has_usage=options.get("include_usage") is True,
        has_log_probs=refusals.read(fields.take, body, "logprobs", int) is not None,
        stop=refusals.read(fields.take_stop, body, "stop") or (),
        num_answers=refusals.read(take_number, body) or 1,
        advice=tuple(refusals.advice),
    )
    refusals.raise_all()
    return call


def _read_prompt(body: JSON) -> str | list[int]:
    prompt = body.get("prompt")
    # Clients send a batch of one.
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    is_tokens = isinstance(prompt, list) and all(type(token) is int and 0 <= token < 1 << 31 for token in prompt)
    if not prompt or not (isinstance(prompt, str) or is_tokens):
        raise CallRefused("prompt must be one text, or one list of token ids", parameter="prompt")
    return prompt


def write_answer(answers: Sequence[Answer], call: Call) -> JSON:
    choices = [_write_choice(number, answer) for number, answer in enumerate(answers)]
    return {**_head(answers[0]), "choices": choices, "usage": write_usage(answers)}


def stream_answer(answers: Sequence[Answer], call: Call) -> Iterator[str]:
    for number, answer in enumerate(answers):
        yield write_event({**_head(answers[0]), "choices": [_write_choice(number, answer)]})
    if call.has_usage:
        yield write_event({**_head(answers[0]), "choices": [], "usage": write_usage(answers)})
    yield "data: [DONE]\n\n"


def _head(answer: Answer) -> JSON:
    return {"id": f"cmpl-{answer.id}", "object": "text_completion", "created": int(time.time()), "model": MODEL}


def _write_choice(number: int, answer: Answer) -> JSON:
    log_probs = None
    if answer.texts:
        starts = [*itertools.accumulate(map(len, answer.texts[:-1]), initial=0)]
        top = [{text: log_prob} for text, log_prob in zip(answer.texts, answer.log_probs, strict=True)]
        log_probs = {
            "tokens": answer.texts, "token_logprobs": answer.log_probs, "top_logprobs": top, "text_offset": starts,
        }  # fmt: skip
    end = "length" if answer.is_cut else "stop"
    return {"index": number, "text": answer.said.content, "finish_reason": end, "logprobs": log_probs}
