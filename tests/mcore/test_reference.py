"""When the reference takes the policy's weights, and what it is called then."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.mcore import reference
from megatron_rl.mcore.reference import Reference


def moves(monkeypatch: pytest.MonkeyPatch, interval: int | None) -> tuple[list[int], Reference]:
    """The versions at which it takes the policy's weights."""
    copied: list[Any] = []
    monkeypatch.setattr(reference, "copy_weights", lambda source, target: copied.append((source, target)))
    weights: Any = SimpleNamespace(fingerprint=lambda dtype: "loaded")
    made = Reference([], weights, None, interval)
    found = []
    for version in range(7):
        policy: Any = [version]
        made.move_if_due(policy, version, f"fingerprint {version}")
        if copied and copied[-1] == (policy, made.chunks):
            found.append(version)
            assert (made.version, made.fingerprint) == (version, f"fingerprint {version}")
    assert len(copied) == len(found)
    return found, made


def test_the_reference_moves_after_every_interval_and_has_the_identity_of_what_it_took(monkeypatch) -> None:
    found, made = moves(monkeypatch, 3)
    assert found == [3, 6]
    assert made.start == "loaded"


def test_without_an_interval_it_stays_what_was_loaded(monkeypatch) -> None:
    found, made = moves(monkeypatch, None)
    assert found == []
    assert (made.version, made.fingerprint) == (None, "loaded")


@pytest.mark.parametrize(("dtype", "is_known"), [(None, True), ("bfloat16", False)])
def test_weights_that_are_rounded_alike_may_differ(monkeypatch, dtype: str | None, is_known: bool) -> None:
    monkeypatch.setattr(reference, "copy_weights", lambda source, target: None)
    weights: Any = SimpleNamespace(fingerprint=lambda dtype: "loaded")
    made = Reference([], weights, dtype, 3)
    assert made.is_policy(0, "loaded") is is_known
    assert not made.is_policy(1, "other")
    made.move_if_due([], 3, "taken")
    assert made.is_policy(3, "taken")
    assert made.is_policy(4, "taken") is is_known


def test_an_identity_that_is_resumed_is_that_of_the_loaded_weights(monkeypatch) -> None:
    weights: Any = SimpleNamespace(fingerprint=lambda dtype: "first")
    made = Reference([], weights, None)
    weights.fingerprint = lambda dtype: "then"
    made.resume(4)
    assert (made.start, made.version, made.fingerprint) == ("first", 4, "then")
