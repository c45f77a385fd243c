"""The optimizer and the scheduler of its rates: Megatron's own, fed with gradient sums and counted in updates."""

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging
from megatron.core.utils import get_model_config

from megatron_rl.config.settings import Settings
from megatron_rl.errors import MegatronRLError
from megatron_rl.ops.adam import use_one_pass
from megatron_rl.trainer.mcore.model.gpt import unwrap


@dataclasses.dataclass(frozen=True)
class UpdateResult:
    was_taken: bool
    """Whether the optimizer stepped. It skips float16 gradients that overflow an adaptive scale, which then shrinks."""
    gradient_norm: float
    """The norm of all parameters' gradients before clipping; NaN if the update was not taken."""
    num_zeros: int | None
    """The number of zeros among the gradients; None without --log-num-zeros-in-grad."""
    learning_rate: float
    """The rate of this update, not of the next one."""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.gradient_norm)


class NonFiniteGradient(MegatronRLError):
    """Gradients that are not finite, and so cannot be applied."""


def build_optimizer(settings: Settings, wrapped: Sequence[DistributedDataParallel]) -> MegatronOptimizer:
    """Build Megatron's optimizer of the chunks that `wrap` returned, and hand its functions to the schedules."""
    optimizer = get_megatron_optimizer(
        copy.copy(settings.optimizer),
        list(wrapped),
        use_gloo_process_groups=settings.distributed.use_gloo_process_groups,
    )
    if settings.model.elementwise_backend == "triton":
        for one in getattr(optimizer, "chained_optimizers", [optimizer]):
            use_one_pass(one.optimizer)
    _share_loss_scale(optimizer)
    _refuse_non_finite_norms(optimizer)
    _connect(optimizer, wrapped)
    return optimizer


def build_scheduler(settings: Settings, optimizer: MegatronOptimizer, num_updates: int) -> OptimizerParamScheduler:
    """Build Megatron's scheduler of learning rate and weight decay: a step per update, over all updates of the run."""
    schedule = settings.schedule
    return OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.lr_warmup_init,
        **resolve_schedule(settings, num_updates),
        use_checkpoint_opt_param_scheduler=schedule.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=schedule.override_opt_param_scheduler,
        wsd_decay_steps=schedule.lr_wsd_decay_iters,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
    )


def resolve_schedule(settings: Settings, num_updates: int) -> dict[str, Any]:
    """Resolve the flags' schedule to values under the scheduler's own names, as a checkpoint has them too."""
    schedule, config = settings.schedule, settings.optimizer
    decay = num_updates if schedule.lr_decay_iters is None else schedule.lr_decay_iters
    warmup: float = schedule.lr_warmup_iters
    if schedule.lr_warmup_fraction is not None:
        warmup = schedule.lr_warmup_fraction * decay
    first, last = schedule.start_weight_decay, schedule.end_weight_decay
    return {
        "max_lr": config.lr,
        "min_lr": config.min_lr,
        "lr_warmup_steps": warmup,
        "lr_decay_steps": decay,
        "lr_decay_style": schedule.lr_decay_style,
        "start_wd": config.weight_decay if first is None else first,
        "end_wd": config.weight_decay if last is None else last,
        "wd_incr_steps": num_updates,
        "wd_incr_style": schedule.weight_decay_incr_style,
    }


def apply_update(
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    wrapped: Sequence[DistributedDataParallel],
    scale: float,
) -> UpdateResult:
    """Multiply the accumulated gradients by `scale`, clip them, step, and clear them for the next update.

    A gradient that is not finite raises on every rank before anything is changed. The exception is float16 with a loss
    scale that can still shrink: then the update is skipped, and the scheduler does not step.
    """
    # That of the parameters that have no rate of their own, even on a rank without parameters.
    rate = get_canonical_lr_for_logging(optimizer.param_groups)
    learning_rate = float(optimizer.param_groups[0]["lr"] if rate is None else rate)
    loss_scale = float(optimizer.get_loss_scale())
    for chunk in wrapped:
        chunk.scale_gradients(scale)
    try:
        was_taken, gradient_norm, num_zeros = optimizer.step()
    except _NonFiniteNorm as error:
        raise _make_error(scheduler, f"the norm of the gradients is {error.norm}") from None
    if was_taken:
        scheduler.step(increment=1)
    elif not optimizer.config.fp16 or optimizer.config.loss_scale:
        raise _make_error(scheduler, "the gradients are not finite")
    elif loss_scale <= optimizer.config.min_loss_scale:
        raise _make_error(scheduler, f"the gradients are not finite at --min-loss-scale {loss_scale:g}")
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    return UpdateResult(
        was_taken=was_taken,
        gradient_norm=float("nan") if gradient_norm is None else float(gradient_norm),
        num_zeros=None if num_zeros is None else int(num_zeros),
        learning_rate=learning_rate,
    )


def force_param_sync(wrapped: Sequence[DistributedDataParallel]) -> None:
    """Gather the parameters that would otherwise be gathered during the next forward pass."""
    for chunk in wrapped:
        if chunk.ddp_config.use_distributed_optimizer and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def _share_loss_scale(optimizer: MegatronOptimizer) -> None:
    """Let experts that have an optimizer of their own share one loss scale with the rest.

    The loss is multiplied by a single scale, and Megatron gives each optimizer a scale of its own. After an overflow in
    only one optimizer, the other would divide by a different scale than the loss was multiplied by.
    """
    chained = getattr(optimizer, "chained_optimizers", ())
    scalers = [one.grad_scaler for one in chained if getattr(one, "grad_scaler", None)]
    if len(scalers) < 2:
        return
    prepare, update = optimizer.prepare_grads, scalers[0].update
    for one in chained:
        one.grad_scaler = scalers[0]
    # Each optimizer would adapt the scale before the next one has divided by it.
    scalers[0].update = lambda found_inf: None

    def prepared() -> bool:
        found_inf = prepare()
        update(found_inf)
        return found_inf

    optimizer.prepare_grads = prepared


class _NonFiniteNorm(Exception):
    def __init__(self, norm: float):
        super().__init__(norm)
        self.norm = norm


def _refuse_non_finite_norms(optimizer: MegatronOptimizer) -> None:
    """Raise before the step if the norm is not finite: Megatron clips by an infinite norm, and lets NaN through."""
    measure = optimizer.get_grad_norm

    def checked() -> float:
        norm = float(measure())
        if not math.isfinite(norm):
            raise _NonFiniteNorm(norm)
        return norm

    optimizer.get_grad_norm = checked


def _make_error(scheduler: OptimizerParamScheduler, what: str) -> NonFiniteGradient:
    return NonFiniteGradient(
        f"{what} in update {scheduler.num_steps + 1}: nothing was updated; look at --lr, --clip-grad and the precision"
    )


def _connect(optimizer: MegatronOptimizer, wrapped: Sequence[DistributedDataParallel]) -> None:
    """Set the functions in the model's configuration that Megatron's training loop would set.

    `run_schedule` sets `no_sync_func`.
    """
    config = get_model_config(wrapped[0])
    config.grad_scale_func = optimizer.scale_loss
    ddp = wrapped[0].ddp_config
    if ddp.overlap_grad_reduce:
        config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in wrapped])
    if ddp.overlap_param_gather:
        if ddp.align_param_gather:
            config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in wrapped])
        for chunk in wrapped:
            _await_output_weight(chunk)


def _one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions


def _await_output_weight(chunk: DistributedDataParallel) -> None:
    """Wait for the output layer's weight. Megatron waits when a module is called, which the output layer never is."""
    inner = unwrap(chunk)
    if not inner.post_process:
        return
    weight = inner.output_weight()
    if weight not in chunk.param_to_bucket_group:
        return
    group = chunk.param_to_bucket_group[weight]

    def wait(*_: torch.nn.Module) -> None:
        group.finish_param_sync(skip_next_bucket_dispatch=chunk.ddp_config.align_param_gather)

    inner.decoder.register_forward_hook(wait)
