"""The ready-made rewards, by name; each entry makes a function of TRL's signature from its argument and time limit."""

from collections.abc import Callable, Mapping
from typing import Any

from megatron_rl.rewards.ready_made import http, text

REWARDS: Mapping[str, Callable[[str | None, float], Callable[..., Any]]] = {
    "exact": text.make_exact,
    "format": text.make_format,
    "gsm8k": text.make_gsm8k,
    "http": http.make_http,
    "length": text.make_length,
    "math": text.make_math,
    "regex": text.make_regex,
}
