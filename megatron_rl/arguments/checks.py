"""What flags must not say together. Each problem names the flag, the bound it breaks, and what to write instead."""

import importlib.util
import math
from collections.abc import Iterator
from typing import get_type_hints

from megatron_rl.arguments import model_checks
from megatron_rl.arguments.model_checks import CP, EP, ETP, PP, TP, countable_sizes
from megatron_rl.config.settings import Settings, Subjects


def problems(settings: Settings) -> Iterator[str]:
    """Everything that is wrong with the flags of any command. What is wrong with a run is in `training.settings`.

    An architecture that is None could not be read: what hangs on it is left out.
    """
    yield from _below_one(settings)
    for subject in get_type_hints(Subjects):
        yield from getattr(settings, subject).problems()
    if settings.architecture is not None:
        yield from model_checks.problems(settings)
        yield from _lengths(settings)
        yield from _world(settings)
    yield from _batches(settings)
    yield from _optimizer(settings)
    yield from _schedule(settings)
    yield from _checkpoint(settings)
    yield from _service(settings)


def _below_one(settings: Settings) -> Iterator[str]:
    config, training, checkpoint = settings.transformer, settings.training, settings.checkpoint
    values = {
        TP: config.tensor_model_parallel_size,
        PP: config.pipeline_model_parallel_size,
        CP: config.context_parallel_size,
        EP: config.expert_model_parallel_size,
        "--num-virtual-stages-per-pipeline-rank": config.virtual_pipeline_model_parallel_size,
        "--recompute-num-layers": config.recompute_num_layers,
        "--micro-batch-size": training.micro_batch_size,
        "--global-batch-size": training.global_batch_size,
        "--seq-length": training.seq_length,
        "--train-iters": training.train_iters,
        "--make-vocab-size-divisible-by": settings.model.make_vocab_size_divisible_by,
        "--save-interval": checkpoint.save_interval,
        "--save-retain-interval": checkpoint.save_retain_interval,
        "--save-keep-last": checkpoint.keep_last,
        "--distributed-timeout-minutes": settings.distributed.distributed_timeout_minutes,
        "--lr-decay-iters": settings.schedule.lr_decay_iters,
        "--lr-wsd-decay-iters": settings.schedule.lr_wsd_decay_iters,
    }
    # They have values that no flag gave, too.
    for flag, field, value in (
        (ETP, "expert_tensor_parallel_size", config.expert_tensor_parallel_size),
        (
            "--microbatch-group-size-per-virtual-pipeline-stage",
            "microbatch_group_size_per_vp_stage",
            config.microbatch_group_size_per_vp_stage,
        ),
    ):
        if f"transformer.{field}" in settings.sources:
            values[flag] = value
    model = settings.architecture
    if model is not None:
        values |= {
            "--num-layers": model.num_layers,
            "--hidden-size": model.hidden_size,
            "--ffn-hidden-size": model.ffn_hidden_size,
            "--num-attention-heads": model.num_attention_heads,
            "--num-query-groups": model.num_query_groups,
            "--kv-channels": model.kv_channels,
            "--vocab-size": model.vocab_size,
        }
    for flag, value in values.items():
        if value is not None and value < 1:
            yield f"{flag} {value} is below 1: write 1 or more"


def _lengths(settings: Settings) -> Iterator[str]:
    length, longest = settings.training.seq_length, settings.architecture.max_position_embeddings
    if length is not None and length > longest:
        yield f"--seq-length {length} is above the model's longest sequence, {longest}: write at most that"


def _world(settings: Settings) -> Iterator[str]:
    sizes, world = countable_sizes(settings), settings.world_size
    if world is None:
        return
    if world % sizes.model:
        yield (
            f"{world} ranks are not a multiple of {TP} {sizes.tensor} times {PP} {sizes.pipeline} times "
            f"{CP} {sizes.context}: start a multiple of {sizes.model} ranks, or make one of them smaller"
        )
    expert_tensor = sizes.expert_tensor or sizes.tensor
    expert_ranks = sizes.expert * expert_tensor * sizes.pipeline
    if settings.architecture.experts and world % expert_ranks:
        yield (
            f"{world} ranks are not a multiple of {EP} {sizes.expert} times {ETP} {expert_tensor} "
            f"times {PP} {sizes.pipeline}: start a multiple of {expert_ranks} ranks, or make one of them smaller"
        )


def _batches(settings: Settings) -> Iterator[str]:
    training, sizes = settings.training, countable_sizes(settings)
    replicas = 0 if settings.world_size is None else settings.world_size // sizes.model
    if training.global_batch_size is None or not replicas:
        return
    unit = max(1, training.micro_batch_size) * replicas
    if training.global_batch_size % unit:
        yield (
            f"--global-batch-size {training.global_batch_size} is not a multiple of --micro-batch-size "
            f"{training.micro_batch_size} times {replicas} replicas: write a multiple of {unit}"
        )
    if sizes.virtual_pipeline is None:
        return
    count = training.global_batch_size // unit
    if not fills_interleaving(settings, count):
        group = interleaved_group(settings)
        yield (
            f"{count} micro-batches a replica do not fill the interleaved schedule of {sizes.pipeline} stages: write "
            f"--global-batch-size so that there is a multiple of {group} micro-batches, or drop the virtual stages"
        )


def interleaved_group(settings: Settings) -> int:
    """The micro-batches that a virtual stage takes in turn."""
    return max(1, settings.transformer.microbatch_group_size_per_vp_stage or countable_sizes(settings).pipeline)


def fills_interleaving(settings: Settings, num_micro_batches: int) -> bool:
    """Whether the interleaved schedule can run so many."""
    stages = countable_sizes(settings).pipeline
    return num_micro_batches >= stages and not 0 < num_micro_batches % interleaved_group(settings) < stages


def _optimizer(settings: Settings) -> Iterator[str]:
    optimizer = settings.optimizer
    for flag, decay in (
        ("--adam-beta1", optimizer.adam_beta1),
        ("--adam-beta2", optimizer.adam_beta2),
        ("--sgd-momentum", optimizer.sgd_momentum),
    ):
        if decay is not None and not 0 <= decay < 1:
            yield f"{flag} {decay:g} is not from 0 to below 1: write one that is"
    for flag, value in (
        ("--adam-eps", optimizer.adam_eps),
        ("--weight-decay", optimizer.weight_decay),
        ("--clip-grad", optimizer.clip_grad),
    ):
        if value is not None and value < 0:
            yield f"{flag} {value:g} is below 0: write 0 or more"
    if settings.ddp.overlap_param_gather:
        for has, flag in (
            (settings.ddp.use_distributed_optimizer, "--use-distributed-optimizer"),
            (settings.ddp.overlap_grad_reduce, "--overlap-grad-reduce"),
        ):
            if not has:
                yield f"--overlap-param-gather needs {flag}: add it, or drop --overlap-param-gather"
    if optimizer.use_precision_aware_optimizer and not optimizer.use_distributed_optimizer:
        yield "--use-precision-aware-optimizer needs --use-distributed-optimizer: add it"
    if optimizer.optimizer == "sgd" and optimizer.use_distributed_optimizer:
        yield "--use-distributed-optimizer shards Adam only: drop it, or --optimizer sgd"
    if optimizer.use_precision_aware_optimizer and importlib.util.find_spec("transformer_engine") is None:
        yield ("--use-precision-aware-optimizer needs TransformerEngine, which is not installed: drop the flag")
    if optimizer.optimizer_cpu_offload and not optimizer.use_precision_aware_optimizer:
        yield "--optimizer-cpu-offload needs --use-precision-aware-optimizer: add it"


def _schedule(settings: Settings) -> Iterator[str]:
    schedule, optimizer = settings.schedule, settings.optimizer
    rate, lowest = optimizer.lr, optimizer.min_lr
    if rate is not None and not 0 <= rate < math.inf:
        yield f"--lr {rate:g} must be a finite number of 0 or more: write one that is"
    elif rate is not None:
        for flag, bound in (("--min-lr", lowest), ("--lr-warmup-init", schedule.lr_warmup_init)):
            if not 0 <= bound <= rate:
                yield f"{flag} {bound:g} is not between 0 and --lr {rate:g}: write one that is"
    if schedule.lr_warmup_iters < 0:
        yield f"--lr-warmup-iters {schedule.lr_warmup_iters} is below 0: write 0 or more"
    if schedule.lr_warmup_fraction is not None:
        if schedule.lr_warmup_iters:
            yield "--lr-warmup-fraction and --lr-warmup-iters say the same in two ways: drop one of them"
        if not 0 <= schedule.lr_warmup_fraction < 1:
            yield (f"--lr-warmup-fraction {schedule.lr_warmup_fraction:g} is not from 0 to below 1: write one that is")
    if schedule.lr_decay_iters is not None and schedule.lr_warmup_iters >= schedule.lr_decay_iters >= 1:
        yield (
            f"--lr-warmup-iters {schedule.lr_warmup_iters} is not below --lr-decay-iters {schedule.lr_decay_iters}: "
            "write fewer"
        )
    if schedule.lr_decay_style == "WSD" and schedule.lr_wsd_decay_iters is None:
        yield "--lr-decay-style WSD needs --lr-wsd-decay-iters: add it"
    if schedule.override_opt_param_scheduler and schedule.use_checkpoint_opt_param_scheduler:
        yield (
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler contradict each other: "
            "drop one of them"
        )
    ends = (schedule.start_weight_decay, schedule.end_weight_decay)
    if schedule.weight_decay_incr_style == "constant" and any(end is not None for end in ends):
        yield (
            "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine: "
            "add it, or write --weight-decay"
        )
    if schedule.weight_decay_incr_style != "constant" and any(end is None for end in ends):
        yield (
            f"--weight-decay-incr-style {schedule.weight_decay_incr_style} needs --start-weight-decay and "
            "--end-weight-decay: add them"
        )
    first, last = ends
    if first is not None and last is not None and not 0 <= first <= last:
        yield (f"--start-weight-decay {first:g} is not between 0 and --end-weight-decay {last:g}: write one that is")


def _checkpoint(settings: Settings) -> Iterator[str]:
    checkpoint = settings.checkpoint
    if checkpoint.save_retain_interval is not None and (
        checkpoint.save_interval is None or checkpoint.save_retain_interval % max(1, checkpoint.save_interval)
    ):
        yield (
            f"--save-retain-interval {checkpoint.save_retain_interval} is not a multiple of --save-interval "
            f"{checkpoint.save_interval}: write one that is"
        )
    save, save_hf = checkpoint.save, checkpoint.save_hf
    if save is not None and save_hf is not None and save.resolve() == save_hf.resolve():
        yield (
            f"--save and --save-hf are both {save}, where folders of iterations would have the same names: write "
            "another --save-hf"
        )
    if checkpoint.load is None:
        for given, flag in (
            (checkpoint.ckpt_step is not None, "--ckpt-step"),
            (checkpoint.exit_on_missing_checkpoint, "--exit-on-missing-checkpoint"),
        ):
            if given:
                yield f"{flag} needs --load: add it, or drop {flag}"


def _service(settings: Settings) -> Iterator[str]:
    endpoint = settings.service.endpoint
    if endpoint is not None and not _is_address(endpoint):
        yield (
            f"--rollout-endpoint {endpoint} must be an address: write http://HOST:PORT, what `address` in the folder "
            "of its run says"
        )


def _is_address(text: str) -> bool:
    # Imported here: whoever starts its own sidecar, or none, parses flags without it.
    import httpx

    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return False
    has_port = url.port is None or 0 < url.port < 65536
    return url.scheme in ("http", "https") and url.host != "" and has_port
