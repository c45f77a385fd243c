"""A reward from tests: --reward examples/coding/reward.py:passes

A response is the expression that a function of a, b and c returns. Its tests are in the row's column `tests`.
"""

import functools

from megatron_rl.rewards.sandbox import score_tests


def passes(completions: list[str], tests: list[list[str]], **columns: object) -> list[float]:
    """Return 1 for code that passes all its tests, else 0."""
    return [float(score(code, tuple(row)) == 1.0) for code, row in zip(completions, tests, strict=True)]


# Responses of a group are often equal.
@functools.lru_cache(maxsize=4096)
def score(code: str, tests: tuple[str, ...]) -> float:
    return score_tests(f"def f(a, b, c):\n    return {code}", tests, seconds=10.0)
