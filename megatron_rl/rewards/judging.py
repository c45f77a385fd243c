"""The question to the judge of `--reward judge:FOLDER`, and the score in its answer.

Invariants:

- what a question has of a row and a response is text: it has no special tokens of the judge's;
- a score follows from the answer's text alone: from the last match of the pattern, in an answer that ended by itself;
- every other answer gets the default, for one of the causes in CAUSES, which is counted; a question without an answer
  counts there too, and gets the value of --reward-on-error.
"""

import contextlib
import dataclasses
import json
import math
import re
import shlex
import string
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.config.rollout import RewardConfig
from megatron_rl.rewards.model_folders import remove_special_tokens
from megatron_rl.rewards.types import Misfit

CAUSES = CUT, MISSING, MALFORMED, FAILED = "cut", "missing", "malformed", "failed"
"""The answer has --judge-max-tokens tokens; nothing in it matches; the match is not a finite number; there is none."""
PROMPT, RESPONSE = "prompt", "response"


def name_counts(name: str) -> dict[str, str]:
    """Return the components that count answers without a score, by cause."""
    return {cause: f"{name}:{cause}" for cause in CAUSES}


def write_question(
    template: str, special: re.Pattern[str], prompt: Any, response: Any, columns: Mapping[str, Any]
) -> str:
    """Write the question about a response; raise a Misfit if the row lacks a column, or has one named as another."""
    judged = {PROMPT: prompt, RESPONSE: response}
    known = {**columns, **judged}
    for name in (names := list_fields(template)):
        if name not in known:
            there = ", ".join(columns) or "none"
            raise Misfit(f"--judge-prompt asks for {name}, and the row has no such column (it has {there}): add it")
        if name in judged and name in columns:
            raise Misfit(f"--judge-prompt asks for {name}, which is judged, and the row has a column {name}: rename it")
    return template.format_map({name: remove_special_tokens(_write(known[name]), special) for name in names})


def read_score(config: RewardConfig, answer: str, is_cut: bool) -> tuple[float, str]:
    """Return the score of an answer, and why it is the default; no cause if it is the judge's own."""
    matches = re.findall(config.judge_pattern, answer)
    if is_cut or not matches:
        return config.judge_default, CUT if is_cut else MISSING
    with contextlib.suppress(ValueError):
        if math.isfinite(score := float(matches[-1])):
            return score, ""
    return config.judge_default, MALFORMED


def list_fields(template: str) -> list[str]:
    """List the fields of a template; raise a ValueError if it has any but plain names."""
    names = []
    for _, name, *form in string.Formatter().parse(template):
        if name is not None and (not name.isidentifier() or any(form)):
            raise ValueError(f"{{{name}}} must be a plain name: write {{{{ and }}}} for braces that are text")
        names += [] if name is None else [name]
    return names


def find_problems(config: RewardConfig, num_judges: int) -> Iterator[str]:
    """Yield each mistake in the flags of a judge, of which a run has at most one."""
    if num_judges == 0:
        for field in dataclasses.fields(config):
            if field.name.startswith("judge_") and getattr(config, field.name) != field.default:
                yield f"--{field.name.replace('_', '-')} needs --reward judge:FOLDER: add it, or drop the flag"
        return
    if num_judges > 1:
        yield f"--reward judge: is given {num_judges} times, and its flags describe one: leave one"
    if config.judge_prompt is None:
        yield "--judge-prompt is missing: name the file of the question to the judge, with {prompt} and {response}"
        return
    if not math.isfinite(config.judge_default):
        yield f"--judge-default {config.judge_default:g} must be finite"
    try:
        flag: tuple[str, object] = "--judge-prompt", config.judge_prompt
        if RESPONSE not in list_fields(config.judge_prompt.read_text(encoding="utf-8")):
            yield f"--judge-prompt {config.judge_prompt} must have {{{RESPONSE}}}, where the response is written"
        flag = "--judge-vllm-args", config.judge_vllm_args
        shlex.split(config.judge_vllm_args)
        flag = "--judge-pattern", config.judge_pattern
        if (count := re.compile(config.judge_pattern).groups) != 1:
            yield f"--judge-pattern {config.judge_pattern} must have 1 group, the score, and has {count}"
    except (OSError, ValueError, re.error) as error:
        yield f"{flag[0]} {flag[1]} cannot be read: {error}; correct it"


def _write(value: Any) -> str:
    """Write a text as it is, a chat as lines of its roles, and any other value as JSON."""
    if isinstance(value, list) and value and all(isinstance(part, dict) and "role" in part for part in value):
        return "\n".join(f"{part['role']}: {_write_turn(part)}" for part in value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _write_turn(turn: Mapping[str, Any]) -> str:
    return " ".join(_write(turn[part]) for part in ("content", "tool_calls") if turn.get(part))
