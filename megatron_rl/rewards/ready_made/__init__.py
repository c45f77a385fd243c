"""The ready-made rewards: each a small file whose `make(argument, timeout)` gives a function of TRL's signature."""

from collections.abc import Callable, Mapping
from typing import Any

from megatron_rl.rewards.ready_made import exact, format, gsm8k, http, length, math, regex

REWARDS: Mapping[str, Callable[[str | None, float], Callable[..., Any]]] = {
    "exact": exact.make,
    "format": format.make,
    "gsm8k": gsm8k.make,
    "http": http.make,
    "length": length.make,
    "math": math.make,
    "regex": regex.make,
}
