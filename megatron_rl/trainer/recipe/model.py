"""The recipe's part of a run: its model, built by its own provider or builder, then made to take packs; and writers.

Megatron's writers, TensorBoard, Weights & Biases and one_logger, are sinks of our metrics. Its timers are reported too.
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.utils import unwrap_model

from megatron_rl.command_line.resolve import list_architecture_fields
from megatron_rl.config.settings import Settings
from megatron_rl.errors import UsageError
from megatron_rl.flag import format_value
from megatron_rl.platforms.megatron_patches import replaced
from megatron_rl.trainer.loop.rank import Recipe
from megatron_rl.trainer.mcore.model.adopt import adopt
from megatron_rl.trainer.mcore.model.gpt import PackedGPTModel

# The timers of its schedules and optimizers; the same on every rank, since all report together.
_TIMED = (
    "forward-backward", "forward-compute", "backward-compute", "forward-recv", "forward-send", "backward-recv",
    "backward-send", "forward-send-forward-recv", "forward-send-backward-recv", "backward-send-forward-recv",
    "backward-send-backward-recv", "forward-backward-send-forward-backward-recv", "all-grads-sync",
    "non-tensor-parallel-grads-all-reduce", "layernorm-grads-all-reduce", "embedding-grads-all-reduce",
    "conditional-embedder-grads-all-reduce", "params-all-gather", "optimizer-copy-to-main-grad",
    "optimizer-unscale-and-check-inf", "optimizer-clip-main-grad", "optimizer-count-zeros", "optimizer-inner-step",
    "optimizer-copy-main-to-model-params",
)  # fmt: skip


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

        return unwrap_model(get_model(self.model_provider, self.model_type, wrap_with_ddp=False))

    def _build_from(self, described: Any) -> list[torch.nn.Module]:
        # Megatron stores in the configuration the functions that its schedules call, and they differ between models.
        described = copy.copy(described)
        described.transformer = copy.copy(described.transformer)
        builder = described.get_builder_cls()(described)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        return unwrap_model(builder.build_distributed_models(groups, wrap_with_ddp=False, model_type=self.model_type))


class MegatronWriters:
    """A sink of an iteration's metrics; a writer is None if no flag asks for it."""

    def __init__(self, tensorboard: Any, wandb: Any, one_logger: Any) -> None:
        self._tensorboard = tensorboard
        self._wandb = wandb
        self._one_logger = one_logger

    def write(self, version: int, values: Mapping[str, float]) -> None:
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, version)
            # Otherwise a kill would lose the last two minutes.
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(dict(values), version)
        if self._one_logger is not None:
            self._one_logger.log_metrics({**values, "train_iterations": version + 1})

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
        if self._one_logger is not None:
            self._one_logger.finish()


def open_writers() -> list[MegatronWriters]:
    """Return the writers of this process, as a sink; Megatron opens them on one rank."""
    from megatron.training import global_vars

    writers = (global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer(), global_vars.get_one_logger())
    return [MegatronWriters(*writers)]


class MegatronTimers:
    """Reports Megatron's timers of the last iterations, as its own training does with --timing-log-level."""

    def __init__(self, args: argparse.Namespace, interval: int) -> None:
        from megatron.training import global_vars

        self.timers = global_vars.get_timers()
        """The timers, for the configurations of model and optimizer."""
        self._is_asked = args.timing_log_level > 0
        self._is_written = args.log_timers_to_tensorboard
        self._is_last = args.rank == args.world_size - 1
        self._interval = interval

    def finish_iteration(self, version: int) -> None:
        """Report the timers if that is due; all ranks call it together. The last rank prints, as Megatron's does.

        It prints by itself, since Megatron prints through a set-up of logging that is not ours.
        """
        if not self._is_asked or (version + 1) % self._interval:
            return
        from megatron.training import global_vars

        if self._is_written:
            writer = global_vars.get_tensorboard_writer()
            self.timers.write(_TIMED, writer, version, normalizer=self._interval, reset=False)
        said = self.timers.get_all_timers_string(_TIMED, normalizer=self._interval)
        if said is not None and self._is_last:
            print(said, flush=True)


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

    with replaced(DotProductAttention, "__init__", build):
        yield


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
