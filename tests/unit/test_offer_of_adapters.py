"""Adapters are not offered: no memory of a device holds what is published."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.errors import UsageError
from megatron_rl.trainer.mcore.publish.offers import Offers


def test_a_trainer_of_adapters_offers_no_memory() -> None:
    weights: Any = SimpleNamespace(adapters=object(), architecture=SimpleNamespace(dtype="float32"), shards=[])
    weights.list_specs = lambda dtype: []
    platform = SimpleNamespace(name="cuda", device_sharing=object)
    session: Any = SimpleNamespace(world_size=1, rank=0, platform=platform)
    assert not Offers(weights, session, "auto", None, True).put(None, "f")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="adapters are trained"):
        Offers(weights, session, "ipc", None, True)
