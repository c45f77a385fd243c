"""What flags must not say together. Each check names the flag, the bound it breaks, and what to write instead."""

import dataclasses
import importlib.util
import math

import torch

from megatron_rl.config import Settings
from megatron_rl.errors import UsageError
from megatron_rl.flags import text_of
from megatron_rl.mcore.backend import backend_of

_TP = "--tensor-model-parallel-size"
_PP = "--pipeline-model-parallel-size"
_CP = "--context-parallel-size"
_EP = "--expert-model-parallel-size"
_ETP = "--expert-tensor-parallel-size"


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sizes that the ranks are divided by."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int
    virtual_stages: int | None
    # The ranks of the run; None where the process was not started as one of them.
    world: int | None

    @property
    def model(self) -> int:
        """The ranks of one replica."""
        return self.tensor * self.pipeline * self.context

    @property
    def replicas(self) -> int | None:
        return None if self.world is None else self.world // self.model


def layout_of(settings: Settings, world_size: int | None) -> Layout:
    transformer = settings.transformer
    tensor = transformer.get("tensor_model_parallel_size", 1)
    return Layout(
        tensor=tensor,
        pipeline=transformer.get("pipeline_model_parallel_size", 1),
        context=transformer.get("context_parallel_size", 1),
        expert=transformer.get("expert_model_parallel_size", 1),
        expert_tensor=transformer.get("expert_tensor_parallel_size") or tensor,
        virtual_stages=transformer.get("virtual_pipeline_model_parallel_size"),
        world=world_size,
    )


def check(settings: Settings, world_size: int | None) -> None:
    """Raise for the first thing that cannot be."""
    layout = layout_of(settings, world_size)
    _positive(settings)
    _architecture(settings)
    _tensor_parallel(settings, layout)
    _context_parallel(settings, layout)
    _pipeline_parallel(settings, layout)
    _virtual_stages(settings, layout)
    _expert_parallel(settings, layout)
    _auxiliary_losses(settings)
    _world(settings, layout)
    _batches(settings, layout)
    _precision(settings)
    _recompute(settings)
    _optimizer(settings)
    _schedule(settings)
    _checkpoint(settings)
    _service(settings)
    _platform(settings, layout)
    backend_of(settings)


def _divisors(*numbers: int) -> str:
    smallest = min(numbers)
    return ", ".join(str(n) for n in range(1, smallest + 1) if all(number % n == 0 for number in numbers))


def _positive(settings: Settings) -> None:
    values = {
        _TP: settings.transformer.get("tensor_model_parallel_size"),
        _PP: settings.transformer.get("pipeline_model_parallel_size"),
        _CP: settings.transformer.get("context_parallel_size"),
        _EP: settings.transformer.get("expert_model_parallel_size"),
        _ETP: settings.transformer.get("expert_tensor_parallel_size"),
        "--num-virtual-stages-per-pipeline-rank": settings.transformer.get("virtual_pipeline_model_parallel_size"),
        "--recompute-num-layers": settings.transformer.get("recompute_num_layers"),
        "--micro-batch-size": settings.training.micro_batch_size,
        "--global-batch-size": settings.training.global_batch_size,
        "--seq-length": settings.training.seq_length,
        "--train-iters": settings.training.train_iters,
        "--make-vocab-size-divisible-by": settings.model.make_vocab_size_divisible_by,
        "--save-interval": settings.checkpoint.save_interval,
        "--save-retain-interval": settings.checkpoint.save_retain_interval,
        "--save-keep-last": settings.checkpoint.keep_last,
        "--distributed-timeout-minutes": settings.distributed.distributed_timeout_minutes,
        "--lr-decay-iters": settings.schedule.lr_decay_iters,
        "--lr-wsd-decay-iters": settings.schedule.lr_wsd_decay_iters,
        "--num-layers": settings.architecture.num_layers,
        "--hidden-size": settings.architecture.hidden_size,
        "--ffn-hidden-size": settings.architecture.ffn_hidden_size,
        "--num-attention-heads": settings.architecture.num_attention_heads,
        "--num-query-groups": settings.architecture.num_query_groups,
        "--kv-channels": settings.architecture.kv_channels,
        "--vocab-size": settings.architecture.vocab_size,
    }
    for flag, value in values.items():
        if value is not None and value < 1:
            raise UsageError(f"{flag} {value} is below 1: write 1 or more")


def _architecture(settings: Settings) -> None:
    model = settings.architecture
    if model.num_attention_heads % model.num_query_groups:
        raise UsageError(
            f"--num-query-groups {model.num_query_groups} does not divide the {model.num_attention_heads} attention "
            f"heads: write one of {_divisors(model.num_attention_heads)}"
        )
    if model.kv_channels % 2:
        raise UsageError(f"--kv-channels {model.kv_channels} is odd, and rotary positions turn pairs: write another")
    pattern = settings.transformer.get("moe_layer_freq", 1)
    if isinstance(pattern, list) and len(pattern) != model.num_layers:
        raise UsageError(
            f"--moe-layer-freq describes {len(pattern)} layers, and there are {model.num_layers}: drop the flag"
        )
    if model.experts and not 1 <= model.experts.num_active <= model.experts.num_experts:
        raise UsageError(
            f"--moe-router-topk {model.experts.num_active} is not between 1 and the {model.experts.num_experts} "
            "experts: write one that is"
        )


def _tensor_parallel(settings: Settings, layout: Layout) -> None:
    model = settings.architecture
    sizes = {
        "attention heads": model.num_attention_heads,
        "query groups": model.num_query_groups,
        "columns of the MLP (ffn_hidden_size)": model.ffn_hidden_size,
    }
    if model.experts:
        del sizes["columns of the MLP (ffn_hidden_size)"]
    for what, size in sizes.items():
        if size % layout.tensor:
            raise UsageError(
                f"{_TP} {layout.tensor} does not divide the {size} {what}: write one of {_divisors(*sizes.values())}"
            )


def _context_parallel(settings: Settings, layout: Layout) -> None:
    if layout.context == 1:
        return
    heads = settings.architecture.num_attention_heads // layout.tensor
    if heads % layout.context:
        raise UsageError(
            f"{_CP} {layout.context} does not divide the {heads} attention heads of a tensor-parallel rank: write "
            f"one of {_divisors(heads)}"
        )
    kind = settings.transformer.get("cp_comm_type")
    if kind != "a2a":
        raise UsageError(
            f"--cp-comm-type {text_of(kind)}: context-parallel ranks exchange attention's heads, in all layers alike: "
            "write a2a, or drop the flag"
        )


def _pipeline_parallel(settings: Settings, layout: Layout) -> None:
    transformer = settings.transformer
    first = transformer.get("num_layers_in_first_pipeline_stage")
    last = transformer.get("num_layers_in_last_pipeline_stage")
    extra = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    layers = settings.architecture.num_layers + sum(bool(transformer.get(field)) for field in extra)
    if first is None and last is None:
        if layers % layout.pipeline:
            raise UsageError(
                f"{_PP} {layout.pipeline} does not divide the {layers} layers: write one of {_divisors(layers)}, "
                "or --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
            )
        return
    if layout.pipeline == 1:
        raise UsageError(
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers need more stages than one: "
            f"write {_PP}, or drop them"
        )
    middle = layers - (first or 0) - (last or 0)
    stages = layout.pipeline - (first is not None) - (last is not None)
    if middle < stages or (middle and not stages) or (stages and middle % stages):
        raise UsageError(
            f"after --decoder-first-pipeline-num-layers {first} and --decoder-last-pipeline-num-layers {last} there "
            f"are {middle} layers for {stages} stages, which cannot be divided: change one of the two"
        )


def _virtual_stages(settings: Settings, layout: Layout) -> None:
    stages = layout.virtual_stages
    if stages is None:
        return
    if layout.pipeline == 1:
        raise UsageError(f"virtual pipeline stages need {_PP} of at least 2: write it, or drop their flag")
    if settings.transformer.get("num_layers_in_first_pipeline_stage") is None and (
        settings.transformer.get("num_layers_in_last_pipeline_stage") is None
    ):
        extra = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
        layers = settings.architecture.num_layers + sum(bool(settings.transformer.get(field)) for field in extra)
        per_rank = layers // layout.pipeline
        if per_rank % stages:
            raise UsageError(
                f"{stages} virtual pipeline stages do not divide the {per_rank} layers of a pipeline rank: write "
                f"--num-virtual-stages-per-pipeline-rank with one of {_divisors(per_rank)}"
            )
    if not settings.transformer["overlap_p2p_comm"] and (layout.pipeline == 2 or settings.platform == "cpu"):
        raise UsageError(
            f"--no-overlap-p2p-communication with virtual pipeline stages and {_PP} {layout.pipeline} gives wrong "
            "results without an error: drop the flag"
        )


def _expert_parallel(settings: Settings, layout: Layout) -> None:
    experts = settings.architecture.experts
    if experts is None:
        for flag, size in ((_EP, layout.expert), (_ETP, settings.transformer.get("expert_tensor_parallel_size") or 1)):
            if size > 1:
                raise UsageError(f"{flag} {size} needs a model with experts, and this one has none: drop the flag")
        return
    if experts.num_experts % layout.expert:
        raise UsageError(
            f"{_EP} {layout.expert} does not divide the {experts.num_experts} experts: "
            f"write one of {_divisors(experts.num_experts)}"
        )
    if experts.ffn_hidden_size % layout.expert_tensor:
        raise UsageError(
            f"{_ETP} {layout.expert_tensor} does not divide the {experts.ffn_hidden_size} columns of an expert: "
            f"write one of {_divisors(experts.ffn_hidden_size)}"
        )
    if layout.tensor > 1 and not settings.transformer.get("sequence_parallel"):
        raise UsageError(
            f"experts with {_TP} {layout.tensor} are trained with sequence parallelism only: add --sequence-parallel"
        )
    dispatcher = settings.transformer.get("moe_token_dispatcher_type")
    if dispatcher == "allgather" and max(layout.expert, layout.pipeline) > 1:
        raise UsageError(
            "--moe-token-dispatcher-type allgather wants micro-batches of one length, and packed groups differ: "
            "write --moe-token-dispatcher-type alltoall"
        )


def _auxiliary_losses(settings: Settings) -> None:
    kind = settings.transformer.get("moe_router_load_balancing_type", "aux_loss")
    weights = {
        "--moe-aux-loss-coeff": settings.transformer.get("moe_aux_loss_coeff"),
        "--moe-z-loss-coeff": settings.transformer.get("moe_z_loss_coeff"),
    }
    for flag, value in (("--moe-router-load-balancing-type", kind), *weights.items()):
        if isinstance(value, list):
            raise UsageError(f"{flag} {' '.join(map(str, value))}: one loss balances experts; write one value")
    for flag, weight in weights.items():
        if not weight:
            continue
        if not 0 < weight < math.inf:
            raise UsageError(f"{flag} {weight:g} weighs a loss that is to become smaller: write 0 or more")
        if settings.architecture.experts is None:
            raise UsageError(f"{flag} {weight:g} needs a model with experts, and this one has none: drop the flag")
    if weights["--moe-aux-loss-coeff"] and kind == "none":
        raise UsageError(
            f"--moe-aux-loss-coeff {weights['--moe-aux-loss-coeff']:g} weighs a loss that "
            "--moe-router-load-balancing-type none leaves out: drop one of the two"
        )


def _world(settings: Settings, layout: Layout) -> None:
    if layout.world is None:
        return
    if layout.world % layout.model:
        raise UsageError(
            f"{layout.world} ranks are not a multiple of {_TP} {layout.tensor} times {_PP} {layout.pipeline} times "
            f"{_CP} {layout.context}: start a multiple of {layout.model} ranks, or make one of them smaller"
        )
    expert_ranks = layout.expert * layout.expert_tensor * layout.pipeline
    if settings.architecture.experts and layout.world % expert_ranks:
        raise UsageError(
            f"{layout.world} ranks are not a multiple of {_EP} {layout.expert} times {_ETP} {layout.expert_tensor} "
            f"times {_PP} {layout.pipeline}: start a multiple of {expert_ranks} ranks, or make one of them smaller"
        )


def _batches(settings: Settings, layout: Layout) -> None:
    training = settings.training
    longest = settings.architecture.max_position_embeddings
    if training.seq_length is not None and training.seq_length > longest:
        raise UsageError(
            f"--seq-length {training.seq_length} is above the model's longest sequence, {longest}: write at most that"
        )
    if training.global_batch_size is None or layout.replicas is None:
        return
    unit = training.micro_batch_size * layout.replicas
    if training.global_batch_size % unit:
        raise UsageError(
            f"--global-batch-size {training.global_batch_size} is not a multiple of --micro-batch-size "
            f"{training.micro_batch_size} times {layout.replicas} replicas: write a multiple of {unit}"
        )
    if layout.virtual_stages is not None:
        _interleaved_micro_batches(settings, layout, training.global_batch_size // unit)


def _interleaved_micro_batches(settings: Settings, layout: Layout, count: int) -> None:
    group = settings.transformer.get("microbatch_group_size_per_vp_stage") or layout.pipeline
    if count < layout.pipeline or 0 < count % group < layout.pipeline:
        raise UsageError(
            f"{count} micro-batches a replica do not fill the interleaved schedule of {layout.pipeline} stages: write "
            f"--global-batch-size so that there is a multiple of {group} micro-batches, or drop the virtual stages"
        )


def _precision(settings: Settings) -> None:
    transformer, optimizer = settings.transformer, settings.optimizer
    if transformer.get("bf16") and transformer.get("fp16"):
        raise UsageError("--bf16 and --fp16 contradict each other: drop one of them")
    if settings.ddp.get("grad_reduce_in_fp32") is False and not transformer.get("bf16"):
        raise UsageError("--grad-reduce-in-bf16 needs --bf16: add it, or drop --grad-reduce-in-bf16")
    precise = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    for field in precise:
        if optimizer.get(field, torch.float32) != torch.float32 and not optimizer.get("use_precision_aware_optimizer"):
            flag = "--" + field.replace("_", "-")
            raise UsageError(f"{flag} needs --use-precision-aware-optimizer: add it, or drop {flag}")


def _recompute(settings: Settings) -> None:
    transformer = settings.transformer
    granularity = transformer.get("recompute_granularity")
    method, count = transformer.get("recompute_method"), transformer.get("recompute_num_layers")
    if granularity == "full" and (method is None or count is None):
        raise UsageError(
            "--recompute-granularity full needs --recompute-method uniform (or block) and --recompute-num-layers: "
            "add them"
        )
    if granularity != "full" and (method is not None or count is not None):
        flag = "--recompute-method" if method is not None else "--recompute-num-layers"
        raise UsageError(f"{flag} is for --recompute-granularity full only: drop it, or write that")
    if transformer.get("distribute_saved_activations") and (
        granularity != "full" or transformer.get("sequence_parallel")
    ):
        raise UsageError(
            "--distribute-saved-activations needs --recompute-granularity full without --sequence-parallel: drop it"
        )


def _optimizer(settings: Settings) -> None:
    optimizer = settings.optimizer
    for flag, decay in (
        ("--adam-beta1", optimizer.get("adam_beta1")),
        ("--adam-beta2", optimizer.get("adam_beta2")),
        ("--sgd-momentum", optimizer.get("sgd_momentum")),
    ):
        if decay is not None and not 0 <= decay < 1:
            raise UsageError(f"{flag} {decay:g} is not from 0 to below 1: write one that is")
    for flag, value in (
        ("--adam-eps", optimizer.get("adam_eps")),
        ("--weight-decay", optimizer.get("weight_decay")),
        ("--clip-grad", optimizer.get("clip_grad")),
    ):
        if value is not None and value < 0:
            raise UsageError(f"{flag} {value:g} is below 0: write 0 or more")
    if settings.ddp.get("overlap_param_gather"):
        for field, flag in (
            ("use_distributed_optimizer", "--use-distributed-optimizer"),
            ("overlap_grad_reduce", "--overlap-grad-reduce"),
        ):
            if not settings.ddp.get(field):
                raise UsageError(f"--overlap-param-gather needs {flag}: add it, or drop --overlap-param-gather")
    if optimizer.get("use_precision_aware_optimizer") and not optimizer.get("use_distributed_optimizer"):
        raise UsageError("--use-precision-aware-optimizer needs --use-distributed-optimizer: add it")
    if optimizer.get("optimizer") == "sgd" and optimizer.get("use_distributed_optimizer"):
        raise UsageError("--use-distributed-optimizer shards Adam only: drop it, or --optimizer sgd")
    if optimizer.get("use_precision_aware_optimizer") and importlib.util.find_spec("transformer_engine") is None:
        raise UsageError(
            "--use-precision-aware-optimizer needs TransformerEngine, which is not installed: drop the flag"
        )
    if optimizer.get("optimizer_cpu_offload") and not optimizer.get("use_precision_aware_optimizer"):
        raise UsageError("--optimizer-cpu-offload needs --use-precision-aware-optimizer: add it")


def _schedule(settings: Settings) -> None:
    schedule, optimizer = settings.schedule, settings.optimizer
    rate, lowest = optimizer.get("lr"), optimizer.get("min_lr") or 0.0
    if rate is not None and not 0 <= rate < math.inf:
        raise UsageError(f"--lr {rate:g} is no rate to learn at: write a finite number, 0 or more")
    if rate is not None and not 0 <= lowest <= rate:
        raise UsageError(f"--min-lr {lowest:g} is not between 0 and --lr {rate:g}: write one that is")
    if rate is not None and not 0 <= schedule.lr_warmup_init <= rate:
        raise UsageError(
            f"--lr-warmup-init {schedule.lr_warmup_init:g} is not between 0 and --lr {rate:g}: write one that is"
        )
    if schedule.lr_warmup_iters < 0:
        raise UsageError(f"--lr-warmup-iters {schedule.lr_warmup_iters} is below 0: write 0 or more")
    if schedule.lr_warmup_fraction is not None:
        if schedule.lr_warmup_iters:
            raise UsageError("--lr-warmup-fraction and --lr-warmup-iters say the same in two ways: drop one of them")
        if not 0 <= schedule.lr_warmup_fraction < 1:
            raise UsageError(
                f"--lr-warmup-fraction {schedule.lr_warmup_fraction:g} is not from 0 to below 1: write one that is"
            )
    if schedule.lr_decay_iters is not None and schedule.lr_warmup_iters >= schedule.lr_decay_iters:
        raise UsageError(
            f"--lr-warmup-iters {schedule.lr_warmup_iters} is not below --lr-decay-iters {schedule.lr_decay_iters}: "
            "write fewer"
        )
    if schedule.lr_decay_style == "WSD" and schedule.lr_wsd_decay_iters is None:
        raise UsageError("--lr-decay-style WSD needs --lr-wsd-decay-iters: add it")
    if schedule.override_opt_param_scheduler and schedule.use_checkpoint_opt_param_scheduler:
        raise UsageError(
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler contradict each other: "
            "drop one of them"
        )
    ends = (schedule.start_weight_decay, schedule.end_weight_decay)
    if schedule.weight_decay_incr_style == "constant" and any(end is not None for end in ends):
        raise UsageError(
            "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine: "
            "add it, or write --weight-decay"
        )
    if schedule.weight_decay_incr_style != "constant" and any(end is None for end in ends):
        raise UsageError(
            f"--weight-decay-incr-style {schedule.weight_decay_incr_style} needs --start-weight-decay and "
            "--end-weight-decay: add them"
        )
    first, last = ends
    if first is not None and last is not None and not 0 <= first <= last:
        raise UsageError(
            f"--start-weight-decay {first:g} is not between 0 and --end-weight-decay {last:g}: write one that is"
        )


def _checkpoint(settings: Settings) -> None:
    checkpoint = settings.checkpoint
    if checkpoint.save_retain_interval is not None and (
        checkpoint.save_interval is None or checkpoint.save_retain_interval % checkpoint.save_interval
    ):
        raise UsageError(
            f"--save-retain-interval {checkpoint.save_retain_interval} is not a multiple of --save-interval "
            f"{checkpoint.save_interval}: write one that is"
        )
    save, save_hf = checkpoint.save, checkpoint.save_hf
    if save is not None and save_hf is not None and save.resolve() == save_hf.resolve():
        raise UsageError(
            f"--save and --save-hf are both {save}, where folders of iterations would have the same names: write "
            "another --save-hf"
        )
    if checkpoint.load is None:
        for given, flag in (
            (checkpoint.ckpt_step is not None, "--ckpt-step"),
            (checkpoint.exit_on_missing_checkpoint, "--exit-on-missing-checkpoint"),
        ):
            if given:
                raise UsageError(f"{flag} needs --load: add it, or drop {flag}")


def _service(settings: Settings) -> None:
    endpoint = settings.service.endpoint
    if endpoint is not None and not _is_address(endpoint):
        raise UsageError(
            f"--rollout-endpoint {endpoint} is no address: write http://HOST:PORT, what `address` in the folder of its "
            "run says"
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


def _platform(settings: Settings, layout: Layout) -> None:
    if settings.platform != "cpu":
        return
    if settings.transformer.get("deterministic_mode"):
        # Megatron then takes rows with weight[ids], whose backward differs from run to run on two threads.
        raise UsageError(
            "--deterministic-mode makes results on the platform cpu differ from run to run: drop the flag, results "
            "are the same without it"
        )
    if settings.architecture.experts is None:
        return
    dispatcher = settings.transformer.get("moe_token_dispatcher_type")
    if dispatcher == "flex":
        raise UsageError("--moe-token-dispatcher-type flex needs CUDA kernels: write alltoall on the platform cpu")
    if dispatcher == "alltoall" and layout.expert_tensor > 1:
        raise UsageError(
            f"{_ETP} {layout.expert_tensor} (that of {_TP} if it is not given) does not work with "
            f"--moe-token-dispatcher-type alltoall on the platform cpu: write {_ETP} 1"
        )
