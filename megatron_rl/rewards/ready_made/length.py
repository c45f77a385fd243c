"""length:LIMIT[,RAMP]: 0 up to LIMIT tokens, then down in a straight line to -1 at LIMIT + RAMP tokens, and -1 beyond.

Without RAMP it is LIMIT itself.
"""

from collections.abc import Callable, Sequence
from typing import Any


def make(argument: str | None, timeout: float) -> Callable[..., list[float]]:
    numbers = (argument or "").split(",")
    if not 1 <= len(numbers) <= 2 or not all(number.isdigit() and int(number) > 0 for number in numbers):
        raise ValueError("length needs a number of tokens: write length:LIMIT or length:LIMIT,RAMP")
    limit, ramp = int(numbers[0]), int(numbers[-1])

    def length(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        return [-min(max(len(ids) - limit, 0) / ramp, 1.0) for ids in completion_ids]

    return length
