"""gsm8k[:COLUMN]: 1 for a completion whose number is the answer's, else 0.

The answer is what follows "####" in the column, or the whole column if it has no "####". A completion's number is the
one after its last "####", or inside its last \\boxed{}, or, with neither, its last number. Thousands separators,
currency, a percent sign and a final period are ignored; 42 and 42.0 are equal.
"""

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from megatron_rl.rewards.types import get_column, get_text

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")


def find_number(text: str) -> Decimal | None:
    """Find the number that a completion, or the column, gives as its answer."""
    boxed = _BOXED.findall(text)
    if "####" in text:
        found = _NUMBER.findall(text.rpartition("####")[2])[:1]
    elif boxed:
        found = _NUMBER.findall(boxed[-1])[:1]
    else:
        found = _NUMBER.findall(text)[-1:]
    return Decimal(found[0].replace(",", "").replace("$", "")) if found else None


def make(argument: str | None, timeout: float) -> Callable[..., list[float]]:
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
