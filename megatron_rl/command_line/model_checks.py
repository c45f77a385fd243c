"""Checks of combinations of flags about the model and its division. See `checks`."""

import dataclasses
from collections.abc import Iterator

from megatron_rl.command_line.resolve import count_layers, list_divisors
from megatron_rl.config.settings import DraftSettings
from megatron_rl.shared.weights.families import find_family
from megatron_rl.types import Architecture

TP = "--tensor-model-parallel-size"
PP = "--pipeline-model-parallel-size"
CP = "--context-parallel-size"
EP = "--expert-model-parallel-size"
ETP = "--expert-tensor-parallel-size"


def _check_divisor(flag: str, size: int, number: int, what: str) -> Iterator[str]:
    if number % size:
        yield f"{flag} {size} does not divide the {number} {what}: write one of {list_divisors(number)}"


def _check_architecture(settings: DraftSettings, model: Architecture) -> Iterator[str]:
    heads = model.num_attention_heads
    yield from _check_divisor("--num-query-groups", model.num_query_groups, heads, "attention heads")
    if model.latents is None and model.kv_channels % 2:
        yield f"--kv-channels {model.kv_channels} must be even, because rotary positions rotate pairs: write another"
    elif (rotary := int(model.rope_channels * model.rope.rotary_fraction)) % 2 or not rotary:
        yield (
            f"--rotary-percent {model.rope.rotary_fraction:g} must rotate an even number of the {model.kv_channels} "
            "dimensions of a head: write another"
        )
    experts = model.experts
    if experts is None:
        return
    if not 1 <= experts.num_active <= experts.num_experts:
        yield (
            f"--moe-router-topk {experts.num_active} must be between 1 and the {experts.num_experts} experts: write "
            "one that is"
        )
    if experts.num_active == 1 and experts.normalize_weights:
        yield (
            "--moe-router-topk 1 scales the weight of a token's one expert to 1, which leaves the router without "
            "gradient: add --moe-router-pre-softmax"
        )
    if settings.transformer.moe_router_fusion and experts.score == "softmax" and experts.num_groups > 1:
        yield ("--moe-router-fusion compares groups of experts by sums of scores, and engines by the largest: drop it")


def _check_engines(settings: DraftSettings, model: Architecture) -> Iterator[str]:
    """Yield the properties of the model that vLLM would not read: the policy would not be the one that is sampled."""
    fix = find_family(model.family).fix_in_engines if model.family else None
    if not settings.run.is_sampled or fix is None:
        return
    fixed = fix(model)
    others = [
        field.name for field in dataclasses.fields(model) if getattr(model, field.name) != getattr(fixed, field.name)
    ]
    if others:
        stated = ", ".join(f"{name} = {getattr(model, name)}" for name in others)
        wanted = ", ".join(f"{name} = {getattr(fixed, name)}" for name in others)
        yield (
            f"--stage grpo needs a {model.family} model as vLLM computes it, with {wanted}, and this one has {stated}: "
            "take another model, or write --stage sft"
        )


def _check_tensor_parallel(settings: DraftSettings, model: Architecture) -> Iterator[str]:
    sizes = settings.parallel_sizes
    divided = {"attention heads": model.num_attention_heads, "query groups": model.num_query_groups}
    if not model.has_experts(0):
        divided["columns of the MLP (ffn_hidden_size)"] = model.ffn_hidden_size
    if model.latents is not None:
        divided["columns of keys' and values' narrow rows (kv_lora_rank and qk_rope_head_dim)"] = (
            model.latents.kv_rank + model.latents.rotary_dim
        )
        if model.latents.query_rank is not None:
            divided["columns of queries' narrow rows (q_lora_rank)"] = model.latents.query_rank
    if model.experts and model.experts.shared_ffn_hidden_size:
        divided["columns of the shared expert"] = model.experts.shared_ffn_hidden_size
    undivided = [f"{size} {what}" for what, size in divided.items() if size % sizes.tensor]
    if undivided:
        yield f"{TP} {sizes.tensor} does not divide the {undivided[0]}: write one of {list_divisors(*divided.values())}"


def _check_context_parallel(settings: DraftSettings, model: Architecture) -> Iterator[str]:
    sizes = settings.parallel_sizes
    heads = model.num_attention_heads // sizes.tensor
    yield from _check_divisor(CP, sizes.context, heads, "attention heads of a tensor-parallel rank")


def _check_linear_layers(settings: DraftSettings, model: Architecture) -> Iterator[str]:
    sizes = settings.parallel_sizes
    linear = model.linear
    if linear is None:
        if settings.model.linear_attention_backend != "auto":
            yield (
                f"--linear-attention-backend {settings.model.linear_attention_backend} needs a model with linear "
                "layers, and this one has none: drop the flag"
            )
        return
    heads = linear.num_key_heads
    yield from _check_divisor("--linear-num-key-heads", heads, linear.num_value_heads, "value heads of linear layers")
    if heads % sizes.tensor:
        yield f"{TP} {sizes.tensor} does not divide the {heads} key heads of linear layers: write another"
    else:
        what = "key heads of linear layers of a tensor-parallel rank"
        yield from _check_divisor(CP, sizes.context, heads // sizes.tensor, what)


def _check_pipeline_parallel(settings: DraftSettings, model: Architecture) -> Iterator[str]:
    sizes = settings.parallel_sizes
    config = settings.transformer
    first, last = config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage
    layers = count_layers(vars(settings.transformer), model)
    if first is None and last is None:
        if layers % sizes.pipeline:
            yield (
                f"{PP} {sizes.pipeline} does not divide the {layers} layers: write one of {list_divisors(layers)}, "
                "or --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
            )
        return
    given = {"--decoder-first-pipeline-num-layers": first, "--decoder-last-pipeline-num-layers": last}
    said = " and ".join(f"{flag} {count}" for flag, count in given.items() if count is not None)
    if sizes.pipeline == 1:
        yield f"{said} needs at least 2 stages: write {PP} 2 or more, or drop it"
        return
    if layers != model.num_layers:
        yield (
            f"{said}: --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split divide layers "
            "differently: drop them"
        )
    middle = model.num_layers - (first or 0) - (last or 0)
    stages = sizes.pipeline - (first is not None) - (last is not None)
    if middle < stages or (middle and not stages) or (stages and middle % stages):
        yield f"after {said} there are {middle} layers for {stages} stages, which cannot be divided: change the count"


def _check_virtual_stages(settings: DraftSettings, model: Architecture) -> Iterator[str]:
    sizes = settings.parallel_sizes
    config, count = settings.transformer, sizes.virtual_pipeline
    if count is None:
        if config.overlap_p2p_comm_warmup_flush:
            yield "--overlap-p2p-communication-warmup-flush needs virtual pipeline stages: add them, or drop the flag"
        return
    if sizes.pipeline == 1:
        yield f"virtual pipeline stages need {PP} of at least 2: add it, or drop the virtual stages"
    first, last = config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage
    per_rank = count_layers(vars(settings.transformer), model) // sizes.pipeline
    if first is None and last is None and per_rank % count:
        yield (
            f"{count} virtual pipeline stages do not divide the {per_rank} layers of a pipeline rank: write "
            f"--num-virtual-stages-per-pipeline-rank with one of {list_divisors(per_rank)}"
        )
    for flag, layers in (("--decoder-first-pipeline-num-layers", first), ("--decoder-last-pipeline-num-layers", last)):
        if layers is not None and layers % count:
            yield f"{flag} {layers} must be a multiple of the {count} virtual stages of a rank: write one that is"


def _check_expert_parallel(settings: DraftSettings, model: Architecture) -> Iterator[str]:
    sizes = settings.parallel_sizes
    experts = model.experts
    if experts is None:
        is_said = "transformer.expert_tensor_parallel_size" in settings.sources
        for flag, size in ((EP, sizes.expert), (ETP, (sizes.expert_tensor or 1) if is_said else 1)):
            if size > 1:
                yield f"{flag} {size} needs a model with experts, and this one has none: drop the flag"
        return
    yield from _check_divisor(EP, sizes.expert, experts.num_experts, "experts")
    expert_tensor = sizes.expert_tensor or sizes.tensor
    yield from _check_divisor(ETP, expert_tensor, experts.ffn_hidden_size, "columns of an expert")
    if expert_tensor > 1 and model.linear_bias:
        yield f"{ETP} {expert_tensor} divides experts, and a bias cannot be divided: write {ETP} 1"
    if sizes.tensor > 1 and not settings.transformer.sequence_parallel:
        yield f"experts with {TP} {sizes.tensor} need sequence parallelism: add --sequence-parallel"


def _check_auxiliary_losses(settings: DraftSettings, model: Architecture) -> Iterator[str]:
    config = settings.transformer
    kind, balance = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    for flag, value in (("--moe-router-load-balancing-type", kind), ("--moe-aux-loss-coeff", balance)):
        if isinstance(value, list):
            yield f"{flag} {' '.join(map(str, value))}: one loss balances experts; write one value"
    if kind in ("seq_aux_loss", "global_aux_loss") and balance:
        yield (
            f"--moe-router-load-balancing-type {kind} counts over one sequence, or earlier micro-batches, and packs "
            "mix both: write aux_loss or none, or --moe-aux-loss-coeff 0"
        )
    for flag, weight in (("--moe-aux-loss-coeff", balance), ("--moe-z-loss-coeff", config.moe_z_loss_coeff)):
        if not weight or isinstance(weight, list):
            continue
        if model.experts is None:
            yield f"{flag} {weight:g} needs a model with experts, and this one has none: drop the flag"
    if balance and not isinstance(balance, list) and kind == "none":
        yield (
            f"--moe-aux-loss-coeff {balance:g} weights a loss that --moe-router-load-balancing-type none leaves out: "
            "drop one of the two"
        )


def _check_recompute(settings: DraftSettings, model: Architecture) -> Iterator[str]:
    config = settings.transformer
    granularity, method, count = config.recompute_granularity, config.recompute_method, config.recompute_num_layers
    if granularity == "full" and (method is None or count is None):
        yield (
            "--recompute-granularity full needs --recompute-method uniform (or block) and --recompute-num-layers: "
            "add them"
        )
    for flag, value in (("--recompute-method", method), ("--recompute-num-layers", count)):
        if granularity != "full" and value is not None:
            yield f"{flag} {value} needs --recompute-granularity full: add it, or drop {flag}"
    if config.distribute_saved_activations and (granularity != "full" or config.sequence_parallel):
        yield "--distribute-saved-activations needs --recompute-granularity full without --sequence-parallel: drop it"
    if config.moe_layer_recompute and settings.sources.get("transformer.recompute_granularity", "").endswith(" full"):
        yield "--moe-layer-recompute adds nothing to --recompute-granularity full, which has the experts in it: drop it"
    if granularity == "selective":
        yield from _check_recomputed_modules(settings, model)
    elif "transformer.recompute_modules" in settings.sources:
        yield (
            f"{settings.sources['transformer.recompute_modules']} needs --recompute-granularity selective: add it, or "
            "drop --recompute-modules"
        )


def _check_recomputed_modules(settings: DraftSettings, model: Architecture) -> Iterator[str]:
    """Yield modules that the model lacks; those that only TransformerEngine's layers recompute are already removed."""
    config = settings.transformer
    can = {"core_attn", "layernorm"} | ({"moe"} if model.experts else set())
    can |= {"shared_experts"} if model.experts and model.experts.shared_ffn_hidden_size else set()
    if config.transformer_impl != "local":
        can |= {"moe_act"} if model.experts and config.moe_grouped_gemm else set()
        can |= set() if model.has_experts(0) else {"mlp"}
    for module in sorted(set(config.recompute_modules or ()) - can):
        yield (
            f"--recompute-modules {module}: the model has no module of that name to recompute: leave it out, or write "
            f"{', '.join(sorted(can))}"
        )


def _check_platform(settings: DraftSettings, model: Architecture) -> Iterator[str]:
    if settings.transformer.use_te_activation_func and settings.transformer.bias_activation_fusion:
        yield "--use-te-activation-func replaces a fusion: add --no-bias-swiglu-fusion, or drop the flag"
    if settings.platform != "cpu":
        return
    if settings.ddp.nccl_ub:
        yield "--use-nccl-ub registers buffers with NCCL, which the platform cpu does not have: drop the flag"
    expert_tensor = settings.parallel_sizes.expert_tensor or settings.parallel_sizes.tensor
    if model.experts is not None and expert_tensor > 1:
        yield (
            f"{ETP} {expert_tensor} (that of {TP} if it is not given) does not work with "
            f"--moe-token-dispatcher-type alltoall on the platform cpu: write {ETP} 1"
        )


DIVISION_CHECKS = (_check_tensor_parallel, _check_context_parallel, _check_linear_layers, _check_expert_parallel)
"""The checks of a model's division over ranks, except for its stages."""
MODEL_CHECKS = (
    _check_architecture, _check_engines, _check_tensor_parallel, _check_context_parallel, _check_linear_layers,
    _check_pipeline_parallel, _check_virtual_stages, _check_expert_parallel, _check_auxiliary_losses, _check_recompute,
    _check_platform,
)  # fmt: skip
"""The checks of settings with a known model."""
