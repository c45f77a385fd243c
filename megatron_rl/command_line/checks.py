"""Checks of combinations of flags: each reads settings, and yields a sentence for each problem.

A sentence names the flag, its value, its bound, and what to write. The bound of a single number belongs to its flag,
and is checked when the flag is read.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import get_type_hints

import torch

from megatron_rl import platforms
from megatron_rl.algorithm.library import PREFERENCES
from megatron_rl.command_line.algorithm_checks import check_algorithm
from megatron_rl.command_line.mode_checks import check_batch_invariant, check_lora, check_megatron_mode
from megatron_rl.command_line.model_checks import CP, EP, ETP, MODEL_CHECKS, PP, TP
from megatron_rl.config.rollout import PublishConfig
from megatron_rl.config.settings import DraftSettings, Settings, Subjects
from megatron_rl.flag import derive_flags
from megatron_rl.shared.protocol.hosts import check_certificate, parse_place
from megatron_rl.shared.protocol.probe import can_hold
from megatron_rl.types import Architecture, Experts
from megatron_rl.versions import find_engine_refusal

# What each stage needs, for errors.
_STAGES: Mapping[str, str] = {
    "grpo": "--stage grpo, which samples responses",
    "sft": "--stage sft, which reads responses",
    "dpo": "--stage dpo, which reads pairs of responses",
    "serve": "--stage serve, which trains as clients ask",
}
# Subjects about sampling, each with the fields that the other stages read too.
_READ_BY_ALL: Mapping[str, tuple[str, ...]] = {
    "rollout": ("folder",),
    "publish": ("dtype",),
    "environment": (),
    "reward": (),
    "sampling": (),
    "service": (),
    "algorithm": (),
}
# The fields of the other subjects that are about sampling, and the fields that only other stages read.
_OF_SAMPLING: Mapping[str, tuple[str, ...]] = {
    "attention": ("is_shared", "times"),
    "data": ("answer_key", "max_prompt_tokens", "rest_below", "rest_above", "rest_epochs"),
    "loop": ("schedule", "consume_order", "frozen_offload", "tri_model"),
    "evaluation": ("num_samples", "temperature", "pass_reward", "eval_command"),
    "observe": ("log_samples", "log_sample_tokens", "mismatch_warning", "mismatch_error"),
}
_OF_DEMONSTRATIONS: Mapping[str, tuple[str, ...]] = {"data": ("completion_key", "messages_key")}
_OF_PAIRS: Mapping[str, tuple[str, ...]] = {
    "data": ("chosen_key", "rejected_key"),
    "preference": ("loss", "beta", "smoothing", "margin"),
}
# The fields about sampling that pairs need as well.
_SAMPLING_AND_PAIRS = ("algorithm.ref_model", "loop.frozen_offload")


def check_settings(settings: DraftSettings) -> Iterator[str]:
    """Yield every mistake in the flags of any command; `run` has the checks that concern only runs.

    An architecture of None could not be read, and checks that depend on it are omitted.
    """
    model = settings.architecture
    if model is not None:
        for check_of_model in (*MODEL_CHECKS, check_length, _check_world):
            yield from check_of_model(settings, model)
    of_all = (_check_stage, check_lora, check_batch_invariant, check_megatron_mode, _check_needs, _check_pairs)
    of_sampling = (
        check_algorithm, _check_curriculum, _check_agents, _check_endpoint, _check_proof, _check_way, _check_deliveries,
        _check_replay,
    )  # fmt: skip
    of_service = (_check_endpoint, _check_proof, _check_way, _check_deliveries, _check_service)
    of_training = (_check_batches, _check_optimizer, _check_schedule, _check_checkpoint)
    of_stage = {"grpo": of_sampling, "sft": (), "dpo": (_check_preference,), "serve": of_service}[settings.run.stage]
    for check in (*of_all, *of_stage, *of_training):
        yield from check(settings)


def _check_needs(settings: DraftSettings) -> Iterator[str]:
    config, optimizer, ddp = settings.transformer, settings.optimizer, settings.ddp
    schedule, checkpoint, algorithm = settings.schedule, settings.checkpoint, settings.algorithm
    truncation = algorithm.importance_truncation
    precise, distributed = "--use-precision-aware-optimizer", "--use-distributed-optimizer"
    for flag, is_given, needed, is_there in (
        ("--overlap-param-gather", ddp.overlap_param_gather, distributed, ddp.use_distributed_optimizer),
        ("--overlap-param-gather", ddp.overlap_param_gather, "--overlap-grad-reduce", ddp.overlap_grad_reduce),
        (precise, optimizer.use_precision_aware_optimizer, distributed, optimizer.use_distributed_optimizer),
        ("--optimizer-cpu-offload", optimizer.optimizer_cpu_offload, precise, optimizer.use_precision_aware_optimizer),
        *(
            (f"--{name.replace('_', '-')}", getattr(optimizer, name) != torch.float32, precise,
             optimizer.use_precision_aware_optimizer)
            for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
        ),
        ("--grad-reduce-in-bf16", settings.sources.get("ddp.grad_reduce_in_fp32") == "--grad-reduce-in-bf16",
         "--bf16", config.bf16),
        ("--lr-decay-style WSD", schedule.lr_decay_style == "WSD", "--lr-wsd-decay-iters",
         schedule.lr_wsd_decay_iters is not None),
        ("--ckpt-step", checkpoint.ckpt_step is not None, "--load", checkpoint.load is not None),
        ("--exit-on-missing-checkpoint", checkpoint.exit_on_missing_checkpoint, "--load", checkpoint.load is not None),
        (f"--rl-importance-sampling-truncation-coef {truncation or 0:g}", truncation is not None,
         "--rl-inference-logprobs-is-correction", algorithm.importance_correction),
    ):  # fmt: skip
        if is_given and not is_there:
            yield f"{flag} needs {needed}: add it, or drop {flag.partition(' ')[0]}"


def _check_curriculum(settings: DraftSettings) -> Iterator[str]:
    data = settings.data
    if data.rest_below is None and data.rest_above is None:
        if "data.rest_epochs" in settings.sources:
            yield "--prompts-rest-epochs needs --prompts-rest-below or --prompts-rest-above: add one, or drop it"
    elif data.rest_below is not None and data.rest_above is not None and not data.rest_below < data.rest_above:
        yield (
            f"--prompts-rest-below {data.rest_below:g} must be below --prompts-rest-above {data.rest_above:g}: "
            "prompts in between are trained on"
        )


def _check_agents(settings: DraftSettings) -> Iterator[str]:
    """Refuse agents that may take as long as an iteration: one that hangs must fail before its iteration does."""
    seconds, minutes = settings.environment.agent_timeout, settings.service.deadline_minutes
    has_agents = settings.environment.agent is not None or settings.environment.verifiers is not None
    if has_agents and seconds >= minutes * 60:
        yield (
            f"--rollout-agent-timeout {seconds:g} must be below {minutes * 60:g} seconds, which is "
            f"--rollout-deadline-minutes {minutes:g}: else an agent that hangs ends the run; write a shorter one"
        )


def _check_pairs(settings: DraftSettings) -> Iterator[str]:
    config, schedule = settings.transformer, settings.schedule
    for first, second, are_given in (
        ("--bf16", "--fp16", config.bf16 and config.fp16),
        ("--lr-warmup-fraction", "--lr-warmup-iters",
         schedule.lr_warmup_fraction is not None and schedule.lr_warmup_iters),
        ("--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler",
         schedule.override_opt_param_scheduler and schedule.use_checkpoint_opt_param_scheduler),
    ):  # fmt: skip
        if are_given:
            yield f"{first} and {second} cannot be given together: drop one of them"


def check_length(settings: DraftSettings, model: Architecture) -> Iterator[str]:
    length, longest = settings.training.seq_length, model.max_position_embeddings
    if length is not None and length > longest:
        yield f"--seq-length {length} is above the model's longest sequence, {longest}: write {longest} or less"


def _check_world(settings: DraftSettings, model: Architecture) -> Iterator[str]:
    sizes, world = settings.parallel_sizes, settings.world_size
    if world is None:
        return
    if world % sizes.model:
        yield (
            f"{world} ranks are not a multiple of {TP} {sizes.tensor} times {PP} {sizes.pipeline} times "
            f"{CP} {sizes.context}: start a multiple of {sizes.model} ranks, or make one of them smaller"
        )
    expert_tensor = sizes.expert_tensor or sizes.tensor
    expert_ranks = sizes.expert * expert_tensor * sizes.pipeline
    if model.experts and world % expert_ranks:
        yield (
            f"{world} ranks are not a multiple of {EP} {sizes.expert} times {ETP} {expert_tensor} "
            f"times {PP} {sizes.pipeline}: start a multiple of {expert_ranks} ranks, or make one of them smaller"
        )


def _check_batches(settings: DraftSettings) -> Iterator[str]:
    training, sizes = settings.training, settings.parallel_sizes
    replicas = 0 if settings.world_size is None else settings.world_size // sizes.model
    if training.global_batch_size is None or not replicas:
        return
    yield from check_division(settings, replicas)
    count = training.global_batch_size // (training.micro_batch_size * replicas)
    if sizes.virtual_pipeline is not None and not fills_interleaving(settings, count):
        yield (
            f"{count} micro-batches a replica do not fill the interleaved schedule of {sizes.pipeline} stages: write a "
            f"--global-batch-size of a multiple of {count_interleaved(settings)} micro-batches, or drop the virtual "
            "stages"
        )


def check_division(settings: DraftSettings, replicas: int) -> Iterator[str]:
    """Yield a problem unless an update has whole micro-batches, and the same number of them in each replica."""
    training = settings.training
    assert training.global_batch_size is not None
    unit = training.micro_batch_size * replicas
    if training.global_batch_size % unit:
        yield (
            f"--global-batch-size {training.global_batch_size} is not a multiple of --micro-batch-size "
            f"{training.micro_batch_size} times {replicas} replicas: write a multiple of {unit}"
        )


def count_interleaved(settings: DraftSettings) -> int:
    """Return the number of micro-batches that a virtual stage takes in turn."""
    return settings.transformer.microbatch_group_size_per_vp_stage or settings.parallel_sizes.pipeline


def fills_interleaving(settings: DraftSettings, num_micro_batches: int) -> bool:
    stages = settings.parallel_sizes.pipeline
    return num_micro_batches >= stages and not 0 < num_micro_batches % count_interleaved(settings) < stages


def _check_optimizer(settings: DraftSettings) -> Iterator[str]:
    optimizer = settings.optimizer
    if optimizer.optimizer == "sgd" and optimizer.use_distributed_optimizer:
        yield "--use-distributed-optimizer shards Adam only: drop it, or --optimizer sgd"
    is_here = platforms.is_installed(settings.platform)
    if is_here and optimizer.use_precision_aware_optimizer and (refusal := find_engine_refusal()) is not None:
        yield f"{refusal}, and --use-precision-aware-optimizer needs it: drop the flag"


def _check_schedule(settings: DraftSettings) -> Iterator[str]:
    schedule, optimizer = settings.schedule, settings.optimizer
    first, last = schedule.start_weight_decay, schedule.end_weight_decay
    for flag, value, top_flag, top in (
        ("--min-lr", optimizer.min_lr, "--lr", optimizer.lr),
        ("--lr-warmup-init", schedule.lr_warmup_init, "--lr", optimizer.lr),
        ("--start-weight-decay", first, "--end-weight-decay", last),
    ):
        if value is not None and top is not None and not 0 <= value <= top:
            yield f"{flag} {value:g} must be between 0 and {top_flag} {top:g}: write one that is"
    if schedule.lr_decay_iters is not None and schedule.lr_warmup_iters >= schedule.lr_decay_iters:
        yield (
            f"--lr-warmup-iters {schedule.lr_warmup_iters} must be below --lr-decay-iters {schedule.lr_decay_iters}: "
            "write fewer"
        )
    style = schedule.weight_decay_incr_style
    if style == "constant" and (first is not None or last is not None):
        yield (
            "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine: "
            "add it, or write --weight-decay"
        )
    if style != "constant" and (first is None or last is None):
        yield f"--weight-decay-incr-style {style} needs --start-weight-decay and --end-weight-decay: add them"


def _check_checkpoint(settings: DraftSettings) -> Iterator[str]:
    checkpoint = settings.checkpoint
    interval, retained = checkpoint.save_interval, checkpoint.save_retain_interval
    if retained is not None and interval is not None and retained % interval:
        yield f"--save-retain-interval {retained} must be a multiple of --save-interval {interval}: write one that is"
    save, save_hf = checkpoint.save, checkpoint.save_hf
    if save is not None and save_hf is not None and save.resolve() == save_hf.resolve():
        yield (
            f"--save and --save-hf are both {save}, where folders of iterations would have the same names: write "
            "another --save-hf"
        )


def _check_service(settings: DraftSettings) -> Iterator[str]:
    """Yield each mistake in the settings of a service."""
    serve, rollout = settings.serve, settings.rollout
    if parse_place(serve.listen) is None:
        yield f"--serve-listen {serve.listen} must be HOST:PORT: write 127.0.0.1:0, or another address"
    if serve.keys_file is not None and not serve.keys_file.is_file():
        yield f"--serve-keys-file {serve.keys_file} is not a file: write one with a key in each line"
    yield from check_certificate(serve.tls_cert, serve.tls_key, "--serve-tls")
    if settings.service.endpoint is not None:
        yield "--rollout-endpoint needs --stage grpo: a service starts engines of its own; drop it"
    config, checkpoint = settings.transformer, settings.checkpoint
    for flag, is_given, why in (
        ("--load", checkpoint.load is not None, "clients load checkpoints"),
        ("--save", checkpoint.save is not None, "clients save checkpoints, below --rollout-folder"),
        ("--load-lora", settings.lora.load is not None, "clients load adapters"),
        ("--optimizer", settings.optimizer.optimizer != "adam", "clients ask for AdamW"),
        ("--fp16", config.fp16, "models would share a loss scale; write --bf16"),
        ("--moe-router-bias-update-rate", bool(config.moe_router_bias_update_rate), "models would share the biases"),
    ):
        if is_given:
            yield f"{flag} does not fit --stage serve, where {why}: drop it"
    if rollout.hosts is not None or rollout.is_colocated or rollout.replay_routing:
        yield "--rollout-hosts, --rollout-colocate and --rollout-replay-routing need --stage grpo: drop them"


def _check_endpoint(settings: DraftSettings) -> Iterator[str]:
    endpoint = settings.service.endpoint
    if endpoint is not None and not _is_address(endpoint):
        yield (
            f"--rollout-endpoint {endpoint} must be an address: write http://HOST:PORT, as the file `address` in the "
            "run's folder has it"
        )


def _check_proof(settings: DraftSettings) -> Iterator[str]:
    """Check that this run's own engines can hold the published weights; others are asked at the first publish."""
    rollout, publish = settings.rollout, settings.publish
    if rollout.engine != "vllm" or settings.service.endpoint is not None or publish.proof == "probe":
        return
    if rollout.dtype is None or publish.dtype is None or can_hold(rollout.dtype, publish.dtype):
        return
    yield (
        f"--rollout-dtype {rollout.dtype} rounds weights that are published in {publish.dtype}, so engines' parameters "
        "cannot be compared bit for bit: write one precision (--rollout-dtype, --publish-dtype), or accept the weaker "
        "proof with --publish-proof probe"
    )


def _check_deliveries(settings: DraftSettings) -> Iterator[str]:
    """Check that flags of deliveries to other hosts have an effect: only files are delivered."""
    publish, transport = settings.publish, settings.rollout.transport
    given = {
        "--publish-lost-host": publish.lost_host != PublishConfig.lost_host,
        "--publish-host-minutes": publish.host_minutes != PublishConfig.host_minutes,
        "--publish-streams": publish.num_streams != PublishConfig.num_streams,
    }
    if transport != "shm":
        for flag in (flag for flag, is_given in given.items() if is_given):
            yield f"{flag} is for --rollout-transport shm, not {transport}: drop one of them"


def _check_way(settings: DraftSettings) -> Iterator[str]:
    """Check that engines may copy weights from the trainer's devices, if they must; devices are asked at the start."""
    transport, platform = settings.rollout.transport, settings.platform
    if settings.rollout.takes_turns:
        turns = "--rollout-colocate sleep"
        if settings.service.endpoint is not None:
            yield f"{turns} is for engines that the run starts itself: drop it, or --rollout-endpoint"
        if settings.publish.through == "ipc":
            yield f"--publish-through ipc with {turns}: ranks are off their devices when engines load: write files"
        if settings.ddp.nccl_ub:
            yield f"--use-nccl-ub registers buffers for good, and {turns} gives them back: drop one of them"
    if settings.publish.through != "ipc":
        return
    if transport != "shm":
        yield f"--publish-through ipc is for --rollout-transport shm, not {transport}: drop one of them"
    elif platform != "cuda":
        yield f"--publish-through ipc needs --platform cuda, not {platform}: write auto or files"
    elif settings.rollout.engine == "scripted":
        yield "--publish-through ipc needs engines that hold weights, not --rollout-engine scripted: drop one of them"


def _check_replay(settings: DraftSettings) -> Iterator[str]:
    """Check that there are experts, and that the trainer's routers can take given ones."""
    of_engines, of_old = "--rollout-replay-routing", "--grpo-replay-routing"
    if not settings.rollout.replay_routing and not settings.algorithm.replay_routing:
        return
    flag = of_engines if settings.rollout.replay_routing else of_old
    if settings.rollout.replay_routing and settings.algorithm.replay_routing:
        yield f"{of_engines} gives the experts of all updates, and {of_old} those of later ones: drop one of them"
    if settings.architecture is not None and settings.architecture.experts is None:
        yield f"{flag} is for models with experts, and this one has none: drop it"
    if settings.rollout.replay_routing and settings.rollout.engine == "scripted":
        yield f"{flag} needs engines that choose experts, not --rollout-engine scripted: drop one of them"
    if settings.transformer.moe_router_fusion:
        yield f"--moe-router-fusion chooses experts in a kernel that takes no given ones: drop it, or {flag}"
    kind = settings.transformer.moe_router_load_balancing_type
    if kind not in ("none", "aux_loss", "seq_aux_loss", "global_aux_loss"):
        yield (
            f"--moe-router-load-balancing-type {kind} chooses experts by itself: write aux_loss or none, or drop {flag}"
        )


def _is_address(text: str) -> bool:
    # Imported here: only a run that names a running sidecar needs it.
    import httpx

    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return False
    has_port = url.port is None or 0 < url.port < 65536
    return url.scheme in ("http", "https") and url.host != "" and has_port


def note_idle_flags(settings: Settings) -> Iterator[str]:
    """Yield a note for each given flag that has no effect without another flag; the note names both."""
    for is_there, text, subject, fields in _list_readers(settings):
        for field in fields.split():
            source = settings.sources.get(f"{subject}.{field}", "")
            if source.startswith("--") and not is_there:
                yield f"{source} has no effect {text}"


def _list_readers(settings: Settings) -> Iterator[tuple[bool, str, str, str]]:
    """Yield whether a run reads these fields of a subject, and the condition under which none does."""
    config, optimizer, ddp = settings.transformer, settings.optimizer, settings.ddp
    checkpoint, model = settings.checkpoint, settings.architecture
    adaptation = "initial_loss_scale min_loss_scale loss_scale_window hysteresis"
    is_adam = optimizer.optimizer == "adam"
    # Some algorithms read the weights of functions, or the function that decides.
    is_ours = (
        settings.service.endpoint is None or settings.algorithm.filter_groups or settings.algorithm.advantage == "gdpo"
    )
    yield is_ours, "beside --rollout-endpoint, whose sidecar gives the rewards", "reward", "functions"
    has_sidecar = settings.service.endpoint is None
    yield has_sidecar, "beside --rollout-endpoint, whose sidecar starts teachers", "rollout", "teacher_devices"
    is_saved, is_exported = checkpoint.save is not None, checkpoint.save_hf is not None
    is_interleaved = config.virtual_pipeline_model_parallel_size is not None
    is_wsd = settings.schedule.lr_decay_style == "WSD"
    prompts, of_update = settings.algorithm.prompts_per_step, settings.training.global_batch_size
    responses = None if prompts is None else prompts * settings.algorithm.group_size
    has_later = responses is not None and of_update is not None and responses > of_update
    yield has_later, "with one update an iteration", "algorithm", "replay_routing"
    of_frozen = "decoupled_lr decoupled_min_lr apply_wd_to_qk_layernorm"
    yield not settings.lora.rank, "with --lora-rank, which trains adapters alone", "optimizer", of_frozen
    yield config.fp16, "without --fp16", "optimizer", f"loss_scale {adaptation}"
    yield not (config.fp16 and optimizer.loss_scale), "with --loss-scale", "optimizer", adaptation
    yield config.bf16, "without --bf16", "transformer", "disable_bf16_reduced_precision_matmul"
    yield is_adam, "with --optimizer sgd", "optimizer", "adam_beta1 adam_beta2 adam_eps"
    yield not is_adam, "without --optimizer sgd", "optimizer", "sgd_momentum"
    yield optimizer.decoupled_lr is not None, "without --decoupled-lr", "optimizer", "decoupled_min_lr"
    offload = "optimizer_offload_fraction use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d"
    pinned = f"{offload} pin_cpu_grads pin_cpu_params"
    yield optimizer.optimizer_cpu_offload, "without --optimizer-cpu-offload", "optimizer", pinned
    yield is_wsd, "without --lr-decay-style WSD", "schedule", "lr_wsd_decay_style lr_wsd_decay_iters"
    norms = "in a model without norms of each head's queries and keys"
    yield model.qk_layernorm and not model.norms_join_heads, norms, "optimizer", "apply_wd_to_qk_layernorm"
    yield is_interleaved, "without virtual pipeline stages", "transformer", "microbatch_group_size_per_vp_stage"
    yield ddp.overlap_grad_reduce, "without --overlap-grad-reduce", "ddp", "bucket_size num_buckets"
    sharded = "pad_buckets_for_high_nccl_busbw reduce_scatter_with_fp32_accumulation"
    yield ddp.use_distributed_optimizer, "without --use-distributed-optimizer", "ddp", sharded
    yield ddp.nccl_ub, "without --use-nccl-ub", "ddp", "disable_symmetric_registration"
    has_bias = model.experts is not None and model.experts.has_bias
    yield has_bias, "in a model whose routers have no bias", "transformer", "moe_router_bias_update_rate"
    routed = "moe_router_dtype moe_router_load_balancing_type moe_layer_recompute moe_token_dispatcher_type"
    yield model.experts is not None, "in a model without experts", "transformer", routed
    experts = " ".join(f"experts.{field.name}" for field in dataclasses.fields(Experts)[1:] if field.name != "score")
    yield model.experts is not None, "in a model without experts", "architecture", experts
    # A softmax is what holds without the flag.
    is_softmax = settings.sources.get("architecture.experts.score", "").endswith(" softmax")
    yield model.experts is not None or is_softmax, "in a model without experts", "architecture", "experts.score"
    yield is_saved or is_exported, "without --save or --save-hf", "checkpoint", "save_interval"
    yield checkpoint.save_interval is not None, "without --save-interval", "checkpoint", "save_retain_interval"
    saving = "keep_last async_save no_save_optim no_save_rng ckpt_fully_parallel_save"
    yield is_saved, "without --save", "checkpoint", saving
    needed = "without prompts to evaluate on: add --prompts-held-out or --eval-prompts"
    yield settings.has_held_out, needed, "evaluation", "interval"
    runs_program = settings.is_evaluated and settings.service.endpoint is None
    needed = "without --eval-interval and prompts to evaluate on, or beside --rollout-endpoint, whose own flag counts"
    yield runs_program, needed, "evaluation", "eval_command"
    loading = "finetune no_load_optim no_load_rng ckpt_fully_parallel_load dist_ckpt_strictness"
    yield checkpoint.load is not None, "without --load", "checkpoint", loading


def list_others() -> dict[str, tuple[str, ...]]:
    """List, by stage, the fields that only other stages read, as "subject.field"."""
    readers = _find_readers()
    return {stage: tuple(field for field, stages in readers.items() if stage not in stages) for stage in _STAGES}


def _find_readers() -> dict[str, tuple[str, ...]]:
    """Return the stages that read a field, by fields that not all stages read."""
    configs = get_type_hints(Subjects)
    of_sampling = [
        f"{subject}.{field.name}"
        for subject, kept in _READ_BY_ALL.items()
        for field in dataclasses.fields(configs[subject])
        if field.name not in kept
    ]
    readers: dict[str, tuple[str, ...]] = dict.fromkeys((*of_sampling, *_join(_OF_SAMPLING)), ("grpo",))
    of_service = [field for field in readers if field.startswith(("rollout.", "publish.", "service."))]
    readers |= dict.fromkeys([*of_service, "attention.times"], ("grpo", "serve"))
    readers |= dict.fromkeys(_join(_OF_DEMONSTRATIONS), ("sft",))
    readers |= dict.fromkeys(_join(_OF_PAIRS), ("dpo",))
    readers |= {f"serve.{field.name}": ("serve",) for field in dataclasses.fields(configs["serve"])}
    return readers | dict.fromkeys(_SAMPLING_AND_PAIRS, ("grpo", "dpo"))


def _check_stage(settings: DraftSettings) -> Iterator[str]:
    """Yield each written flag that only other stages have."""
    # A flag such as --algorithm sets several fields.
    needed = {
        settings.sources.get(target, ""): ", or ".join(_STAGES[stage] for stage in stages)
        for target, stages in _find_readers().items()
        if settings.run.stage not in stages
    }
    for source, stage in needed.items():
        if source.startswith("--"):
            yield f"{source} needs {stage}: write that, or drop {source.partition(' ')[0]}"


def _check_preference(settings: DraftSettings) -> Iterator[str]:
    """Yield each written flag that the loss of pairs does not read."""
    config = settings.preference
    for flag, field in zip(derive_flags(type(config), "preference"), dataclasses.fields(config), strict=True):
        source = settings.sources.get(f"preference.{field.name}", "")
        reads = ("loss", "beta", *PREFERENCES[config.loss].reads)
        if field.name in reads or getattr(config, field.name) == field.default:
            continue
        names = " or ".join(name for name, one in PREFERENCES.items() if field.name in one.reads)
        yield f"{source} has no effect with --dpo-loss-type {config.loss}: drop it, or write {flag.name} with {names}"
    if settings.algorithm.ref_model is not None and not PREFERENCES[config.loss].has_reference:
        yield f"--grpo-ref-model has no effect with --dpo-loss-type {config.loss}, which has no reference: drop it"
    if settings.loop.frozen_offload and not PREFERENCES[config.loss].has_reference:
        yield f"--frozen-offload has no effect with --dpo-loss-type {config.loss}, which has no reference: drop it"


def _join(fields: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(f"{subject}.{field}" for subject, names in fields.items() for field in names)
