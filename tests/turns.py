"""Turns that a test's engine says."""

from collections.abc import Sequence
from typing import Any

from megatron_rl.shared.protocol import wire


def make_turn(tokens: Sequence[int], first: float = -1.0, version: str = "1", **changes: Any) -> wire.Response:
    """Make a turn of these tokens, whose log-probs go down from the first by 1."""
    fields = {
        "finish_reason": "stop",
        "seed": 0,
        "engine": "engine-0",
        "spans": [wire.VersionSpan(version=version, start=0, end=len(tokens))],
        "fingerprint": "w",
    }
    return wire.Response(
        tokens=wire.encode_tokens(tokens),
        log_probs=wire.encode_log_probs([first - place for place in range(len(tokens))]),
        **{**fields, **changes},
    )
