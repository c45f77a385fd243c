"""What a run takes from the recipe that started it, if one did."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_rl.config.settings import Settings
from megatron_rl.mcore.model.gpt import PackedGPTModel, build_model


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The parts in which a recipe of Megatron's differs from a run that stands alone."""

    build_model: Callable[[Settings], list[PackedGPTModel]] = build_model
    """This rank's stages of a model, their weights not yet filled. It is called once for each model of a run."""
    saved: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What Megatron looks for in a checkpoint beside model and optimizer: the recipe's arguments."""
    open_sinks: Callable[[], Sequence[Any]] | None = None
    """Opens the recipe's own writers, which take the metrics on rank 0 in place of those that our flags open."""
    finish_iteration: Callable[[int], None] = lambda version: None
    """Called by every rank when the iteration of a version is over."""


STAND_ALONE = Recipe()
