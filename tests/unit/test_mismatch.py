"""The allowed difference of the trainer's and the engines' log-probs, and its value over all replicas."""

import math

import numpy as np
import pytest

from megatron_rl.shared.protocol.probe import (
    find_agreement,
    find_bound,
    find_coarsest_dtype,
    limit_by_spread,
    measure_difference,
)
from megatron_rl.shared.protocol.wire import EngineKind, Mismatch
from megatron_rl.trainer.loop.mismatch import MismatchBounds, ReplicaMismatch, combine_parts
from megatron_rl.trainer.mcore.step.forward_step import Unreplayed


@pytest.mark.parametrize(
    ("dtypes", "kind", "expected"),
    [
        (("float32",), EngineKind(), 5e-3),
        (("bfloat16",), EngineKind(), 0.25),
        (("float32",), EngineKind(dtype="bfloat16", device="cuda"), 0.25),
        (("float32",), EngineKind(is_quantized=True), 2e-2),
        (("bfloat16",), EngineKind(dtype="bfloat16", has_experts=True), 0.5),
        (("float32",), EngineKind(has_model=False), None),
    ],
)
def test_the_bound_follows_from_the_coarsest_precision_of_trainer_and_engine(dtypes, kind, expected) -> None:
    assert MismatchBounds(dtypes, temperature=1.0).error(kind) == pytest.approx(expected)
    assert MismatchBounds(dtypes, temperature=1.5).error(kind) == pytest.approx(expected)
    half = MismatchBounds(dtypes, temperature=0.5).error(kind)
    assert half == (None if expected is None else pytest.approx(2 * expected))
    given = MismatchBounds(dtypes, temperature=0.5, given=0.125).error(kind)
    assert given == (0.125 if kind.has_model else None)


def test_a_model_with_experts_has_the_bound_of_another_if_their_choice_is_replayed() -> None:
    kind = EngineKind(dtype="bfloat16", has_experts=True)
    assert MismatchBounds(("bfloat16",), temperature=1.0, replays_routing=True).error(kind) == pytest.approx(0.25)


def test_the_mean_without_replay_covers_the_replicas_that_measured_it() -> None:
    parts = [ReplicaMismatch(3.0, 0.5, 30, Unreplayed(2.0, 10)), ReplicaMismatch(1.0, 2.0, 10, Unreplayed(4.0, 20))]
    assert combine_parts([*parts, ReplicaMismatch(0.0, 0.0, 20)], 0.2) == Mismatch(
        mean=4 / 60, largest=2.0, bound=0.2, without_replay=0.2
    )


def test_tokens_that_differ_are_counted_over_replicas() -> None:
    parts = [ReplicaMismatch(1e-6, 1e-6, 30, num_differing=2), ReplicaMismatch(0.0, 0.0, 10)]
    assert combine_parts([*parts, parts[0]], 0.0).num_differing == 4


def test_the_bound_of_a_probe_follows_from_dtypes_and_device() -> None:
    assert find_bound(EngineKind(), "float32") == 1e-3
    assert find_bound(EngineKind(device="cuda"), "float32") == 1e-2
    assert (
        find_bound(EngineKind(device="cuda"), "bfloat16") == find_bound(EngineKind(dtype="bfloat16"), "float32") == 0.5
    )
    assert find_bound(EngineKind(dtype="bfloat16", has_experts=True), "float32") == 2.0
    assert find_bound(EngineKind(is_quantized=True), "float32") == 4e-3
    assert find_coarsest_dtype("float32", "bfloat16", "float16") == "bfloat16"


def test_the_bound_between_engines_is_tight_only_where_all_run_one_program_in_float32() -> None:
    assert find_agreement(EngineKind()) == 1e-5
    assert find_agreement(EngineKind(device="npu")) == 1e-2
    assert find_agreement(EngineKind(dtype="bfloat16")) == 0.5
    assert find_agreement(EngineKind(has_experts=True)) == 4e-3
    assert find_agreement(EngineKind(dtype="bfloat16", is_quantized=True)) == 2.0


def test_the_mean_covers_all_tokens_of_all_replicas() -> None:
    found = combine_parts([ReplicaMismatch(3.0, 0.5, 30), ReplicaMismatch(1.0, 2.0, 10)], 0.2)
    assert found == Mismatch(mean=0.1, largest=2.0, bound=0.2)
    assert found.is_accepted
    assert not combine_parts([ReplicaMismatch(3.0, 0.5, 10)], 0.2).is_accepted
    assert combine_parts([ReplicaMismatch(3.0, 0.5, 10)], None).is_accepted


def test_a_mismatch_of_nan_is_above_every_bound() -> None:
    for parts in (
        [ReplicaMismatch(math.nan, math.nan, 4), ReplicaMismatch(1.0, 1.0, 4)],
        [ReplicaMismatch(1.0, 1.0, 4), ReplicaMismatch(math.nan, math.nan, 4)],
    ):
        found = combine_parts(parts, 1e9)
        assert math.isnan(found.largest)
        assert not found.is_accepted
        assert not combine_parts(parts, math.inf).is_accepted


@pytest.mark.parametrize("has_experts", [False, True])
@pytest.mark.parametrize("scale", [0.2, 1.0, 3.0])
def test_a_model_that_knows_nothing_of_the_trainers_log_probs_is_beyond_the_bound(has_experts, scale):
    kind = EngineKind(dtype="bfloat16", device="cuda", has_experts=has_experts)
    draws = np.random.default_rng(0)
    for _ in range(200):
        own = draws.normal(-5, scale, 63)
        bound = limit_by_spread(find_bound(kind, "bfloat16"), kind, own.tolist())
        # Another model, one that gives all tokens the same log-prob, and what bfloat16 rounds (measured: 0.06 of 1).
        for other in (draws.normal(-5, scale, 63), np.full(63, -5.0)):
            assert not measure_difference(other.tolist(), own.tolist()).mean <= bound
        near = own + draws.normal(0, 0.06 * scale, 63)
        assert measure_difference(near.tolist(), own.tolist()).mean <= bound


def test_the_spread_of_log_probs_never_lowers_a_bound_below_what_float32_rounds():
    kind = EngineKind(dtype="bfloat16")
    assert limit_by_spread(0.5, kind, [-5.0] * 63) == limit_by_spread(0.5, kind, []) == 1e-3
    assert limit_by_spread(1e-4, kind, [-1.0, -9.0] * 30) == 1e-4
