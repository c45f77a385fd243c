"""The recipe's model: built by its own provider or builder, then made to take packs."""

import argparse
import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron_rl.command_line.resolve import list_architecture_fields
from megatron_rl.config.settings import Settings
from megatron_rl.errors import UsageError
from megatron_rl.flag import format_value
from megatron_rl.trainer.loop.rank import Recipe
from megatron_rl.trainer.mcore.model.adopt import adopt
from megatron_rl.trainer.mcore.model.gpt import PackedGPTModel
from megatron_rl.trainer.recipe.writers import MegatronTimers, open_writers


@dataclasses.dataclass(frozen=True)
class Provided:
    """The arguments of `pretrain` that build a model: a provider, or a configuration that has a builder."""

    model_provider: Callable[..., Any] | None
    model_type: Any
    config: Any
    """The configuration that the script made of its arguments; None before 0.18."""

    def build(self) -> list[torch.nn.Module]:
        """Build this rank's stages as the recipe has them, without wrappers.

        If the script passes a configuration and a provider, the configuration is used.
        """
        described = getattr(self.config, "model", None)
        if described is not None:
            return self._build_from(described)
        if self.model_provider is None:
            raise UsageError(
                "the recipe calls pretrain with neither a model provider nor a model configuration: pass one of them"
            )
        from megatron.training.training import get_model

        return [_unwrap(chunk) for chunk in get_model(self.model_provider, self.model_type, wrap_with_ddp=False)]

    def _build_from(self, described: Any) -> list[torch.nn.Module]:
        # Megatron stores in the configuration the functions that its schedules call, and they differ between models.
        described = copy.copy(described)
        described.transformer = copy.copy(described.transformer)
        builder = described.get_builder_cls()(described)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        chunks = builder.build_distributed_models(groups, wrap_with_ddp=False, model_type=self.model_type)
        return [_unwrap(chunk) for chunk in chunks]


def build_recipe(
    provided: Provided, args: argparse.Namespace, timers: MegatronTimers, say: Callable[[str], None]
) -> Recipe:
    """Collect the recipe's part of a run. Pass to `say`, once, each difference of its model from config.json."""
    said: set[str] = set()

    def build_model(settings: Settings) -> list[PackedGPTModel]:
        with _built_for_one_context_rank():
            chunks = provided.build()
        for chunk in chunks:
            config: Any = chunk.config
            if problems := list(_check_settled(config, settings)):
                raise UsageError(*problems)
            config.timers = timers.timers
            for difference in _list_differences(config, settings):
                if args.rank == 0 and difference not in said:
                    said.add(difference)
                    say(difference)
        model = settings.model
        backends = (
            settings.attention.backend, model.output_layer_backend, model.elementwise_backend, model.qkv_backend
        )  # fmt: skip
        return [adopt(chunk, settings.architecture, *backends) for chunk in chunks]

    return Recipe(build_model, {"args": args}, open_writers, timers.finish_iteration)


@contextlib.contextmanager
def _built_for_one_context_rank() -> Iterator[None]:
    """Let Megatron's core attention be built under context parallelism, which it refuses: ours replaces it."""
    stock = DotProductAttention.__init__

    @functools.wraps(stock)
    def build(self: DotProductAttention, config: Any, *arguments: Any, **keywords: Any) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        stock(self, alone, *arguments, **keywords)
        self.config = config

    DotProductAttention.__init__ = build
    try:
        yield
    finally:
        DotProductAttention.__init__ = stock


def _check_settled(config: Any, settings: Settings) -> Iterator[str]:
    """Yield each field that differs from the settings and that schedules depend on: a provider may set its own."""
    for target, source in settings.sources.items():
        subject, _, field = target.partition(".")
        if subject != "transformer":
            continue
        value, wanted = getattr(config, field), getattr(settings.transformer, field)
        if value != wanted:
            yield (
                f"the recipe's model has {field} = {format_value(value)}, and {format_value(wanted)} is needed "
                f"({source}): take it from core_transformer_config_from_args, or from the configuration that is passed"
            )


def _list_differences(config: Any, settings: Settings) -> Iterator[str]:
    """Yield each difference of the model from the one that engines load."""
    for field in list_architecture_fields(settings.architecture):
        value, described = getattr(config, field), getattr(settings.transformer, field)
        if value != described and not callable(value):
            yield (
                f"the recipe's model has {field} = {format_value(value)}, config.json says {format_value(described)}: "
                "engines must compute as the recipe does"
            )


def _unwrap(chunk: Any) -> torch.nn.Module:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk  # type: ignore[no-any-return]
