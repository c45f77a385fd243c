"""Probes that do not agree name the engine; what is not a number agrees with nothing."""

import math

import pytest

from megatron_rl.protocol.wire import Weights
from megatron_rl.sidecar.publication import _off_the_middle

WEIGHTS = Weights(run="run", version=3, fingerprint="f", transport="shm", dtype="float32", location="")


@pytest.mark.parametrize("odd", [[-2.0, -1.0, -3.1], [-2.0, math.nan, -3.0], [math.nan, -1.0, -3.0]])
def test_an_engine_whose_probe_differs_from_the_others_is_named(odd):
    most = [-2.0, -1.0, -3.0]
    assert _off_the_middle({"a": most, "b": most}, WEIGHTS, 1e-5) == {}
    assert "b" in _off_the_middle({"a": most, "b": odd, "c": most}, WEIGHTS, 1e-5)
