"""The ready-made rewards: each is made by `make_NAME(argument, timeout)`, as a function of TRL's signature.

The argument follows the reward's name and a colon; the timeout is the function's limit in seconds.
"""

import http.client
import importlib.util
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from megatron_rl.rewards.classifier import make_model
from megatron_rl.rewards.types import get_column, get_text

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_TRIES = 3
_FIRST_PAUSE = 0.25
_MOST_ANSWER_BYTES = 1 << 20


def make_exact(argument: str | None, timeout: float) -> Callable[..., list[float]]:
    """Make exact[:COLUMN]: 1 for a completion that equals the answer, else 0.

    White space at both ends is ignored. The column is `answer` unless another is named.
    """
    name = argument or "answer"

    def exact(completions: Sequence[Any], **columns: Any) -> list[float]:
        answers = get_column(columns, name, "exact")
        return [
            float(get_text(completion).strip() == str(answer).strip())
            for completion, answer in zip(completions, answers, strict=True)
        ]

    return exact


def make_format(argument: str | None, timeout: float) -> Callable[..., list[float]]:
    """Make format[:TAG,TAG...]: 1 for a completion of these tagged parts in this order, each once, else 0.

    The default tags are `<think>...</think>` and then `<answer>...</answer>`. White space may surround the parts;
    anything else outside them gives 0.
    """
    tags = (argument or "think,answer").split(",")
    for tag in tags:
        if not re.fullmatch(r"\w+", tag):
            raise ValueError(f"{tag!r} is not the name of a tag: write format:think,answer")
    pattern = re.compile(r"\s*".join(["", *(rf"<{tag}>(.*?)</{tag}>" for tag in tags), ""]), re.DOTALL)
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]

    def is_well_formed(text: str) -> bool:
        return all(text.count(mark) == 1 for mark in marks) and pattern.fullmatch(text) is not None

    def format(completions: Sequence[Any], **columns: Any) -> list[float]:
        return [float(is_well_formed(get_text(completion))) for completion in completions]

    return format


def make_gsm8k(argument: str | None, timeout: float) -> Callable[..., list[float]]:
    """Make gsm8k[:COLUMN]: 1 for a completion with the same number as the answer, else 0.

    The answer is the text after "####" in the column, or the whole column if it has no "####". The column is `answer`
    unless another is named. `find_number` says which number of a completion counts.
    """
    name = argument or "answer"

    def gsm8k(completions: Sequence[Any], **columns: Any) -> list[float]:
        wanted = [find_number(str(answer)) for answer in get_column(columns, name, "gsm8k")]
        if None in wanted:
            raise ValueError(f"column {name} holds no number")
        return [
            float(find_number(get_text(completion)) == answer)
            for completion, answer in zip(completions, wanted, strict=True)
        ]

    return gsm8k


def find_number(text: str) -> Decimal | None:
    """Find the number that a completion, or the column, gives as its answer.

    It is the number after the last "####". A text without "####" gives the number in its last \\boxed{}, and a text
    with neither gives its last number. Thousands separators, currency, a percent sign and a final period are ignored;
    42 and 42.0 are equal.
    """
    boxed = _BOXED.findall(text)
    if "####" in text:
        found = _NUMBER.findall(text.rpartition("####")[2])[:1]
    elif boxed:
        found = _NUMBER.findall(boxed[-1])[:1]
    else:
        found = _NUMBER.findall(text)[-1:]
    return Decimal(found[0].replace(",", "").replace("$", "")) if found else None


def make_length(argument: str | None, timeout: float) -> Callable[..., list[float]]:
    """Make length:LIMIT[,RAMP]: 0 up to LIMIT tokens, then down in a straight line to -1 at LIMIT + RAMP tokens.

    Longer completions get -1 too. RAMP is LIMIT unless it is given.
    """
    numbers = (argument or "").split(",")
    if not 1 <= len(numbers) <= 2 or not all(number.isdigit() and int(number) > 0 for number in numbers):
        raise ValueError("length needs a number of tokens: write length:LIMIT or length:LIMIT,RAMP")
    limit, ramp = int(numbers[0]), int(numbers[-1])

    def length(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        return [-min(max(len(ids) - limit, 0) / ramp, 1.0) for ids in completion_ids]

    return length


def make_math(argument: str | None, timeout: float) -> Callable[..., list[float | None]]:
    """Make math[:COLUMN]: 1 for a completion whose answer is mathematically equal to the solution, else 0.

    math-verify compares them. The column is `solution` unless another is named. A solution that cannot be parsed gives
    None: the reward does not apply.
    """
    name = argument or "solution"
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("the reward math needs math-verify: pip install 'math-verify[antlr4_13_2]'")

    def math(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        solutions = get_column(columns, name, "math")
        return [
            _verify(get_text(completion), str(solution))
            for completion, solution in zip(completions, solutions, strict=True)
        ]

    return math


def _verify(completion: str, solution: str) -> float | None:
    from math_verify import parse, verify

    # A bare number or formula is parsed only between dollars.
    gold = parse(solution) or parse(f"${solution}$")
    if not gold:
        return None
    return float(verify(gold, parse(completion)))


def make_regex(argument: str | None, timeout: float) -> Callable[..., list[float]]:
    """Make regex:PATTERN: 1 for a completion that contains a match, else 0; a dot matches the end of a line too."""
    if not argument:
        raise ValueError("regex needs a pattern: write regex:PATTERN")
    try:
        pattern = re.compile(argument, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{argument!r} is not a regular expression: {error}") from None

    def regex(completions: Sequence[Any], **columns: Any) -> list[float]:
        return [float(pattern.search(get_text(completion)) is not None) for completion in completions]

    return regex


def make_http(argument: str | None, timeout: float) -> Callable[..., list[Any]]:
    """Make http://ADDRESS: the rewards that a remote reward model answers with.

    Each group is one POST of `{"prompts", "completions", "completion_ids", "columns"}`. The answer is `{"rewards":
    [...]}` or the bare list, with a number or null for each completion.

    Failed connections and answers of 500 and above are tried again, three times in all and within the function's limit.
    Every other answer is final. If REWARD_HTTP_TOKEN is in the worker's environment, it is sent as a bearer token.
    """
    if not argument or not argument.startswith(("http://", "https://")):
        raise ValueError("http needs the address of the reward model: write --reward http://HOST/PATH")
    url = argument

    def http(prompts: list[Any], completions: list[Any], completion_ids: list[Any], **columns: Any) -> list[Any]:
        content = {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
            "columns": columns,
        }
        # Ends a little before the pool's limit, so that a late answer is this function's own error.
        return _read_rewards(url, _ask(url, json.dumps(content).encode(), time.monotonic() + 0.9 * timeout))

    return http


def _ask(url: str, body: bytes, deadline: float) -> bytes:
    headers = {"Content-Type": "application/json"}
    if "REWARD_HTTP_TOKEN" in os.environ:
        headers["Authorization"] = f"Bearer {os.environ['REWARD_HTTP_TOKEN']}"
    for attempt in range(_TRIES):
        request = urllib.request.Request(url, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=max(deadline - time.monotonic(), 0.01)) as answer:
                return answer.read(_MOST_ANSWER_BYTES + 1)
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise RuntimeError(f"{url} answered {error.code} {error.reason}") from None
            reason = f"answered {error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            reason = f"did not answer: {error}"
        pause = _FIRST_PAUSE * 2**attempt
        if attempt == _TRIES - 1 or time.monotonic() + pause > deadline:
            break
        time.sleep(pause)
    raise RuntimeError(f"{url} {reason} (tried {attempt + 1} times)")


def _read_rewards(url: str, answer: bytes) -> list[Any]:
    if len(answer) > _MOST_ANSWER_BYTES:
        raise RuntimeError(f"{url} answered with more than {_MOST_ANSWER_BYTES} bytes")
    try:
        content = json.loads(answer)
    except ValueError:
        raise RuntimeError(f"{url} did not answer with JSON") from None
    rewards = content.get("rewards") if isinstance(content, dict) else content
    if not isinstance(rewards, list):
        raise RuntimeError(f'{url} answered without a list of "rewards"')
    return rewards


REWARDS: Mapping[str, Callable[[str | None, float], Callable[..., Any]]] = {
    "exact": make_exact,
    "format": make_format,
    "gsm8k": make_gsm8k,
    "http": make_http,
    "length": make_length,
    "math": make_math,
    "model": make_model,
    "regex": make_regex,
}
