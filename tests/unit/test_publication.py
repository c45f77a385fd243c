"""Probes that do not agree name the engine.

A value that is not a number agrees with none; the bound follows the engines.
"""

import math
from collections.abc import Mapping

import pytest

from megatron_rl.shared.protocol.wire import EngineKind, FileSource, Weights
from megatron_rl.sidecar.engines import WeightReport
from megatron_rl.sidecar.publication import Proof, Published, StepFailed, _must_agree

WEIGHTS = Weights(run="run", version=3, fingerprint="f", source=FileSource(folder=""), dtype="float32")
MOST = [-2.0, -1.0, -3.0]
CPU, BF16 = EngineKind(), EngineKind(dtype="bfloat16", device="cuda")


def find_refused(
    probes: Mapping[str, list[float]],
    kind: EngineKind = CPU,
    before: Published | None = None,
    given: float | None = None,
) -> dict[str, str]:
    try:
        _must_agree(probes, [kind] * len(probes), WEIGHTS, before, given)
    except StepFailed as failure:
        return {name: str(error) for name, error in failure.errors.items()}
    return {}


@pytest.mark.parametrize("odd", [[-2.0, -1.0, -3.1], [-2.0, math.nan, -3.0], [math.nan, -1.0, -3.0]])
def test_an_engine_whose_probe_differs_from_the_others_is_named(odd):
    assert find_refused({"a": MOST, "b": MOST}) == {}
    assert set(find_refused({"a": MOST, "b": odd, "c": MOST})) == {"b"}


def test_engines_that_compute_in_bfloat16_may_differ_by_what_it_rounds():
    near, far = [value + 0.1 for value in MOST], [value + 2.0 for value in MOST]
    assert find_refused({"a": MOST, "b": near, "c": MOST}, BF16) == {}
    assert set(find_refused({"a": MOST, "b": far, "c": MOST}, BF16)) == {"b"}
    assert set(find_refused({"a": MOST, "b": near, "c": MOST}, CPU)) == {"b"}


def test_the_bound_that_is_given_replaces_the_one_of_the_engines():
    near = [value + 0.1 for value in MOST]
    assert find_refused({"a": MOST, "b": near, "c": MOST}, CPU, given=0.2) == {}
    refused = find_refused({"a": MOST, "b": near, "c": MOST}, BF16, given=0.05)
    assert set(refused) == {"b"}
    assert "(--publish-agreement-bound)" in refused["b"]
    assert "--rollout-dtype" in refused["b"]
    assert set(find_refused({"a": MOST, "b": [math.nan] * 3, "c": MOST}, given=math.inf)) == {"b"}


def test_an_engine_that_joins_is_compared_by_the_coarser_of_its_kind_and_the_others():
    before = Published(WEIGHTS, (), tuple(MOST), None, (BF16,))
    near = [value + 0.1 for value in MOST]
    assert find_refused({"late": near}, CPU, before) == {}
    refused = find_refused({"late": near}, CPU, Published(WEIGHTS, (), tuple(MOST), None, (CPU,)))
    assert "the other engines with the same weights" in refused["late"]


def test_the_answer_says_how_all_engines_got_their_weights_and_why_any_took_files():
    def answer(*reports: WeightReport) -> tuple[str, tuple[str, ...]]:
        proofs = tuple(Proof(str(number), report) for number, report in enumerate(reports))
        found = Published(WEIGHTS, proofs, tuple(MOST), None, (CPU,) * len(proofs)).build_answer()
        return found.through, found.reasons

    direct = WeightReport(3, "f", 4, 4, through="ipc")
    files = WeightReport(3, "f", 4, 4, reasons=("the trainer runs on another host",))
    assert answer(direct, direct) == ("ipc", ())
    assert answer(direct, files, files) == ("files", ("the trainer runs on another host",))
