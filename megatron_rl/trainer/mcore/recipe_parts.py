"""The parts that a run takes from the Megatron recipe that started it, if one did."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_rl.config.settings import Settings
from megatron_rl.trainer.mcore.model.gpt import PackedGPTModel, build_model


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The parts in which a run of a Megatron recipe differs from a run that stands alone."""

    build_model: Callable[[Settings], list[PackedGPTModel]] = build_model
    """The builder of this rank's chunks of a model, with unfilled weights; called once for each model of a run."""
    saved: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The recipe's arguments, which Megatron expects in a checkpoint beside model and optimizer."""
    open_sinks: Callable[[], Sequence[Any]] | None = None
    """The opener of the recipe's own writers, which get rank 0's metrics in place of our flags' writers."""
    finish_iteration: Callable[[int], None] = lambda version: None
    """A function that every rank calls at the end of a version's iteration."""


STAND_ALONE = Recipe()
