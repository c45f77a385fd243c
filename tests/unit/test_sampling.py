"""The requests to engines: where responses end."""

import types
from typing import Any

import pytest

from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.trainer.loop.rollouts import build_sampling


@pytest.mark.parametrize(
    ("stops", "own", "ignores", "expected"),
    [
        ((), None, False, []),
        ((7,), None, False, [7]),
        ((7,), [9], False, [9, 7]),
        ((7,), [7], False, [7]),
        ((7,), [9], True, [9]),
    ],
)
def test_the_end_of_a_turn_is_among_the_stop_tokens_unless_ends_are_ignored(stops, own, ignores, expected):
    settings: Any = types.SimpleNamespace(
        sampling=types.SimpleNamespace(stop_token_ids=own, ignore_eos=ignores),
        sizes=types.SimpleNamespace(longest_response=8),
        environment=EnvironmentConfig(),
    )
    prompts: Any = types.SimpleNamespace(stops=stops)
    assert build_sampling(settings, 1.0, prompts).stop_token_ids == expected
