"""math[:COLUMN]: 1 for a completion whose answer is mathematically equal to the solution, else 0; math-verify judges.

The column is `solution` unless another is named. A solution that cannot be parsed gives None: the reward does not
apply.
"""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from megatron_rl.rewards.types import get_column, get_text


def make(argument: str | None, timeout: float) -> Callable[..., list[float | None]]:
    name = argument or "solution"
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("the reward math needs math-verify: pip install 'math-verify[antlr4_13_2]'")

    def math(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        solutions = get_column(columns, name, "math")
        return [_score(get_text(text), str(gold)) for text, gold in zip(completions, solutions, strict=True)]

    return math


def _score(completion: str, solution: str) -> float | None:
    from math_verify import parse, verify

    # A bare number or formula is parsed only between dollars.
    gold = parse(solution) or parse(f"${solution}$")
    if not gold:
        return None
    return float(verify(gold, parse(completion)))
