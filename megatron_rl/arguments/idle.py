"""Flags that do something only beside others: without those they are said to have no effect."""

import dataclasses
from collections.abc import Iterator

from megatron_rl.config.settings import Settings


@dataclasses.dataclass(frozen=True)
class _Need:
    """What the values of these targets are read with."""

    is_there: bool
    text: str
    targets: tuple[str, ...]


def notes(settings: Settings) -> Iterator[str]:
    """What was asked for and nothing reads, each with what it needs."""
    for need in _needs(settings):
        for target in need.targets:
            source = settings.sources.get(target, "")
            if source.startswith("--") and not need.is_there:
                yield f"{source} has no effect {need.text}"


def _needs(settings: Settings) -> Iterator[_Need]:
    yield from _of_updates(settings)
    yield from _of_layouts(settings)
    yield from _of_checkpoints(settings)


def _of_updates(settings: Settings) -> Iterator[_Need]:
    config, optimizer, schedule = settings.transformer, settings.optimizer, settings.schedule
    adaptive = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    yield _Need(config.fp16, "without --fp16", _of("optimizer", "loss_scale", *adaptive))
    yield _Need(not (config.fp16 and optimizer.loss_scale), "with --loss-scale", _of("optimizer", *adaptive))
    yield _Need(config.bf16, "without --bf16", _of("transformer", "disable_bf16_reduced_precision_matmul"))
    is_adam = optimizer.optimizer == "adam"
    yield _Need(is_adam, "with --optimizer sgd", _of("optimizer", "adam_beta1", "adam_beta2", "adam_eps"))
    yield _Need(not is_adam, "without --optimizer sgd", _of("optimizer", "sgd_momentum"))
    yield _Need(optimizer.decoupled_lr is not None, "without --decoupled-lr", _of("optimizer", "decoupled_min_lr"))
    offloading = ("optimizer_offload_fraction", "use_torch_optimizer_for_cpu_offload", "overlap_cpu_optimizer_d2h_h2d")
    yield _Need(
        optimizer.optimizer_cpu_offload,
        "without --optimizer-cpu-offload",
        _of("optimizer", *offloading, "pin_cpu_grads", "pin_cpu_params"),
    )
    of_wsd = _of("schedule", "lr_wsd_decay_style", "lr_wsd_decay_iters")
    yield _Need(schedule.lr_decay_style == "WSD", "without --lr-decay-style WSD", of_wsd)
    of_norms = _of("optimizer", "apply_wd_to_qk_layernorm")
    yield _Need(settings.architecture.qk_layernorm, "in a model without norms of queries and keys", of_norms)


def _of_layouts(settings: Settings) -> Iterator[_Need]:
    config, ddp = settings.transformer, settings.ddp
    is_interleaved = config.virtual_pipeline_model_parallel_size is not None
    virtual = _of("transformer", "microbatch_group_size_per_vp_stage")
    yield _Need(is_interleaved, "without virtual pipeline stages", virtual)
    yield _Need(ddp.overlap_grad_reduce, "without --overlap-grad-reduce", _of("ddp", "bucket_size"))
    sharded = _of("ddp", "pad_buckets_for_high_nccl_busbw", "reduce_scatter_with_fp32_accumulation")
    yield _Need(ddp.use_distributed_optimizer, "without --use-distributed-optimizer", sharded)
    yield _Need(ddp.nccl_ub, "without --use-nccl-ub", _of("ddp", "disable_symmetric_registration"))
    routed = ("moe_router_dtype", "moe_router_load_balancing_type", "moe_layer_recompute", "moe_token_dispatcher_type")
    has_experts = settings.architecture.experts is not None
    yield _Need(has_experts, "in a model without experts", _of("transformer", *routed))


def _of_checkpoints(settings: Settings) -> Iterator[_Need]:
    checkpoint = settings.checkpoint
    is_saved = checkpoint.save is not None
    yield _Need(
        is_saved or checkpoint.save_hf is not None, "without --save or --save-hf", _of("checkpoint", "save_interval")
    )
    saving = ("save_retain_interval", "keep_last", "async_save", "no_save_optim", "no_save_rng")
    yield _Need(is_saved, "without --save", _of("checkpoint", *saving, "ckpt_fully_parallel_save"))
    loading = ("finetune", "no_load_optim", "no_load_rng", "ckpt_fully_parallel_load", "dist_ckpt_strictness")
    yield _Need(checkpoint.load is not None, "without --load", _of("checkpoint", *loading))


def _of(subject: str, *fields: str) -> tuple[str, ...]:
    return tuple(f"{subject}.{field}" for field in fields)
