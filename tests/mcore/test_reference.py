"""The times when the reference takes the policy's weights, and its name then."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.trainer.mcore.step import policy as reference
from megatron_rl.trainer.mcore.step.policy import FrozenModel


def weights_of(identity: str, dtype: str = "float32", exact: str = "") -> Any:
    """Build weights of a model that is stored in bfloat16; `exact` is their fingerprint in float32."""
    return SimpleNamespace(
        fingerprint=lambda dtype: exact if dtype == "float32" else identity,
        dtype=dtype,
        architecture=SimpleNamespace(dtype="bfloat16"),
    )


def moves(monkeypatch: pytest.MonkeyPatch, interval: int | None) -> tuple[list[int], FrozenModel]:
    """Return the versions at which the reference takes the policy's weights."""
    copied: list[Any] = []
    monkeypatch.setattr(reference, "copy_weights", lambda source, target: copied.append((source, target)))
    made = FrozenModel([], weights_of("loaded"), None, interval)
    found = []
    for version in range(7):
        policy: Any = [version]
        made.move_if_due(policy, version, f"fingerprint {version}")
        if copied and copied[-1] == (policy, made.chunks):
            found.append(version)
            assert (made.version, made.fingerprint) == (version, f"fingerprint {version}")
    assert len(copied) == len(found)
    return found, made


def test_the_reference_moves_after_every_interval(monkeypatch) -> None:
    found, made = moves(monkeypatch, 3)
    assert found == [3, 6]
    assert made.start == "loaded"


def test_without_an_interval_the_reference_stays_as_loaded(monkeypatch) -> None:
    found, made = moves(monkeypatch, None)
    assert found == []
    assert (made.version, made.fingerprint) == (None, "loaded")


def test_a_policy_that_equals_the_reference_only_after_rounding_is_another_model(monkeypatch) -> None:
    monkeypatch.setattr(reference, "copy_weights", lambda source, target: None)
    for published in (None, "bfloat16"):
        made = FrozenModel([], weights_of("loaded", exact="of the folder"), published, 3)
        assert made.is_policy(weights_of("loaded", exact="of the folder"), 0, "loaded")
        assert not made.is_policy(weights_of("loaded", exact="a little further"), 1, "loaded")
        assert not made.is_policy(weights_of("other"), 1, "other")
        made.move_if_due([], 3, "taken")
        assert made.is_policy(weights_of("taken", exact="not asked for"), 3, "taken")
        assert not made.is_policy(weights_of("taken", exact="a little further"), 4, "taken")


def test_weights_published_without_rounding_are_compared_by_fingerprint() -> None:
    made = FrozenModel([], weights_of("loaded", "bfloat16"), None)
    assert made.is_policy(weights_of("loaded", "bfloat16", exact="not asked for"), 4, "loaded")


def test_a_resumed_reference_has_the_identity_of_the_loaded_weights() -> None:
    weights = weights_of("first")
    made = FrozenModel([], weights, None)
    weights.fingerprint = lambda dtype: "then"
    made.resume(4)
    assert (made.start, made.version, made.fingerprint) == ("first", 4, "then")
