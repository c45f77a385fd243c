"""The resolution of Megatron's flags into complete configurations of megatron-core."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from megatron_rl.flag import Flag, Kind
from megatron_rl.flag_parser import Given
from megatron_rl.platforms import Platform
from megatron_rl.platforms.megatron_configs import find_flash_attention, find_megatron_version, import_configs
from megatron_rl.types import Architecture, Experts
from megatron_rl.versions import find_engine_refusal

Reasons = dict[str, tuple[Any, str]]
"""Values of fields, each with the reason for it."""

# Modules that megatron-core recomputes with a class that needs TransformerEngine.
_ENGINE_MODULES = ("mlp", "moe_act")
# Kernels of TransformerEngine, which only its layers call.
_ENGINE_ONLY = ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion", "use_te_activation_func")


def build_transformer_config(architecture: Architecture, asked: Mapping[str, Any], platform: Platform) -> Any:
    """Build the TransformerConfig of a model of this architecture, with the other values in `asked`."""
    fields = {**list_architecture_fields(architecture), **asked}
    settled = {field: value for field, (value, _) in settle_fields(fields, platform).items()}
    return import_configs(architecture.latents is not None)["transformer"](**{**fields, **settled})


def settle_fields(asked: Mapping[str, Any], platform: Platform) -> Reasons:
    """Settle the fields that follow from packs of any length, from loaded weights, and from the platform's kernels."""
    return (
        _settle_precision(asked)
        | _settle_packing(asked)
        | _settle_addition(asked)
        | _settle_activation(asked)
        | _settle_invariance(asked)
        | _settle_limits(asked, platform)
    )


def list_architecture_fields(architecture: Architecture) -> dict[str, Any]:
    """Return TransformerConfig's fields about the model itself."""
    window = architecture.sliding_window
    # Megatron would sum over ranks the gradients of norms that are not of each head.
    is_of_heads = architecture.latents is None and not architecture.norms_join_heads
    fields: dict[str, Any] = {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "ffn_hidden_size": architecture.ffn_hidden_size,
        "num_attention_heads": architecture.num_attention_heads,
        "num_query_groups": architecture.num_query_groups,
        "kv_channels": architecture.kv_channels,
        "normalization": "RMSNorm",
        "layernorm_epsilon": architecture.norm_epsilon,
        "qk_layernorm": architecture.qk_layernorm and is_of_heads,
        "gated_linear_unit": True,
        "activation_func": _ACTIVATIONS[architecture.activation],
        "add_bias_linear": architecture.linear_bias,
        "add_qkv_bias": architecture.qkv_bias or architecture.linear_bias,
        # Megatron counts the tokens to the left of a token, and the architecture counts the token too.
        "window_size": None if window is None else (window - 1, 0),
    }
    if architecture.attention_gate:
        fields["attention_output_gate"] = True
    if architecture.rope.interleaved:
        fields["rotary_interleaved"] = True
    if architecture.zero_centered_norms:
        fields["layernorm_zero_centered_gamma"] = True
    if architecture.linear is not None:
        # Megatron builds none of its own linear layers, and names a checkpoint's tensors by their layers.
        fields["linear_attention_freq"] = architecture.linear.full_interval
    if architecture.full_layers:
        windows = [architecture.find_window(layer) for layer in range(architecture.num_layers)]
        fields["window_attn_skip_freq"] = [int(one is not None) for one in windows]
    latents = architecture.latents
    if latents is not None:
        fields |= {
            "multi_latent_attention": True,
            "q_lora_rank": latents.query_rank,
            "kv_lora_rank": latents.kv_rank,
            "qk_head_dim": latents.plain_dim,
            "qk_pos_emb_head_dim": latents.rotary_dim,
            "v_head_dim": latents.value_dim,
            # Megatron's own angles follow rows, and are not used.
            "rope_type": "rope",
        }
    if architecture.activation_clamp is not None:
        fields |= {"activation_func_clamp_value": architecture.activation_clamp, "glu_linear_offset": 1.0}
    experts = architecture.experts
    if experts is not None:
        fields |= {
            "num_moe_experts": experts.num_experts,
            "moe_router_topk": experts.num_active,
            "moe_ffn_hidden_size": experts.ffn_hidden_size,
            # A softmax over the chosen experts alone equals a softmax over all of them, scaled to sum to one.
            "moe_router_pre_softmax": not experts.normalize_weights,
        }
        fields |= _list_special_fields(architecture, experts)
    return fields


def gelu_tanh(gate: torch.Tensor) -> torch.Tensor:
    """Compute GELU by its approximation with a hyperbolic tangent."""
    return F.gelu(gate, approximate="tanh")


def quick_gelu(gate: torch.Tensor) -> torch.Tensor:
    """Compute GELU by its approximation with a sigmoid."""
    return gate * torch.sigmoid(1.702 * gate)


_ACTIVATIONS = {"silu": F.silu, "gelu_tanh": gelu_tanh, "clamped_swiglu": quick_gelu}


def _list_special_fields(architecture: Architecture, experts: Experts) -> dict[str, Any]:
    """Return the fields about experts that only some models have."""
    fields: dict[str, Any] = {}
    if experts.score != "softmax":
        fields["moe_router_score_function"] = experts.score
    if experts.score != "softmax" or architecture.latents is not None:
        # These models compute scores in float32, whatever the dtype of their weights.
        fields["moe_router_dtype"] = "fp32"
    if experts.has_bias:
        fields |= {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.0}
    if experts.scaling_factor != 1:
        fields["moe_router_topk_scaling_factor"] = experts.scaling_factor
    if experts.num_groups > 1:
        fields |= {"moe_router_num_groups": experts.num_groups, "moe_router_group_topk": experts.num_active_groups}
    if experts.num_dense_layers:
        fields["moe_layer_freq"] = [int(architecture.has_experts(layer)) for layer in range(architecture.num_layers)]
    if experts.shared_ffn_hidden_size:
        fields["moe_shared_expert_intermediate_size"] = experts.shared_ffn_hidden_size
        fields["moe_shared_expert_gate"] = experts.has_shared_gate
    return fields


def _settle_precision(asked: Mapping[str, Any]) -> Reasons:
    dtype, source = torch.float32, "neither --bf16 nor --fp16"
    if asked.get("bf16"):
        dtype, source = torch.bfloat16, "that of --bf16"
    elif asked.get("fp16"):
        dtype, source = torch.float16, "that of --fp16"
    return {"params_dtype": (dtype, source), "pipeline_dtype": (dtype, source)}


def _settle_packing(asked: Mapping[str, Any]) -> Reasons:
    is_interleaved = bool(asked.get("virtual_pipeline_model_parallel_size"))
    # Interleaved stages deadlock or compute nonsense unless they send and receive this way, and up to 0.18 free outputs
    # that they still need.
    interleaving = "as virtual pipeline stages need it" if is_interleaved else "without virtual pipeline stages"
    has_latents = bool(asked.get("multi_latent_attention"))
    return {
        # Megatron's kernel for multi-latent attention rotates keys by their rows.
        **({"apply_rope_fusion": (False, "positions follow packs")} if has_latents else {}),
        "variable_seq_lengths": (True, "packed groups differ in length"),
        # Megatron requires it for variable lengths, even in models without experts.
        "moe_token_dispatcher_type": ("alltoall", "packed groups differ in length"),
        "perform_initialization": (False, "weights are loaded"),
        "hidden_dropout": (0.0, "the policy is the one that the engines sample from"),
        "attention_dropout": (0.0, "the policy is the one that the engines sample from"),
        # Megatron divides the loss by its weight to report it, and leaves it out only if the weight is None.
        "moe_z_loss_coeff": (asked.get("moe_z_loss_coeff") or None, "a weight of 0 means no such loss"),
        "overlap_p2p_comm": (is_interleaved, interleaving),
        "batch_p2p_comm": (not is_interleaved, interleaving),
        "deallocate_pipeline_outputs": (not is_interleaved, interleaving),
    }


def _settle_addition(asked: Mapping[str, Any]) -> Reasons:
    # Megatron compiles this function, and the host takes three times as long to call it as to add.
    if asked.get("num_moe_experts") and asked.get("add_bias_linear"):
        return {"bias_dropout_fusion": (False, "experts add their biases themselves")}
    if asked.get("add_bias_linear") is not False:
        return {}
    return {"bias_dropout_fusion": (False, "without biases and dropout there is one addition, and nothing to fuse")}


def _settle_activation(asked: Mapping[str, Any]) -> Reasons:
    if asked.get("activation_func") in (None, F.silu):
        return {}
    names = ["bias_activation_fusion"] + ["use_te_activation_func"] * bool(asked.get("use_te_activation_func"))
    return dict.fromkeys(names, (False, "the MLP's activation has no such kernel"))


def _settle_invariance(asked: Mapping[str, Any]) -> Reasons:
    """Settle what Megatron's batch-invariant mode needs: its products overwrite a sum of gradients, and do not add."""
    if not asked.get("batch_invariant_mode"):
        return {}
    # Megatron wants the last two. They choose a kernel of TransformerEngine's attention, which has no part here.
    needed = {
        "gradient_accumulation_fusion": False,
        "attention_backend": find_flash_attention(),
        "flash_attention_version": 3,
    }
    known = _list_known()
    return {field: (value, "--batch-invariant-mode") for field, value in needed.items() if field in known}


def _list_known() -> set[str]:
    """List the fields that the installed version's TransformerConfig has."""
    return {field.name for field in dataclasses.fields(import_configs()["transformer"])}


def _settle_limits(asked: Mapping[str, Any], platform: Platform) -> Reasons:
    source = f"platform {platform.name}"
    limits: Reasons = {field: (value, source) for field, value in platform.unsupported_fusions.items()}
    if platform.name != "cpu":
        source = find_engine_refusal() or ""
        if not source and asked.get("transformer_impl") == "local":
            source = "--transformer-impl local"
    if source:
        limits |= {"transformer_impl": ("local", source)} | dict.fromkeys(_ENGINE_ONLY, (False, source))
        modules = asked.get("recompute_modules")
        if modules is not None:
            limits["recompute_modules"] = ([name for name in modules if name not in _ENGINE_MODULES], source)
    known = _list_known()
    return {field: reason for field, reason in limits.items() if field in known}


def list_cheap_modules(
    modules: Sequence[str], architecture: Architecture, given: Mapping[str, Given]
) -> tuple[str, ...]:
    """List those of a platform's cheap modules whose tensors this model's layers can compute again.

    In TransformerEngine's layers a norm is a part of the linear layer after it, unless experts come after it.
    """
    impl = given.get("transformer.transformer_impl")
    is_local = find_engine_refusal() is not None or (impl is not None and impl.value == "local")
    return tuple(modules) if is_local or architecture.experts is not None else ()


SUBJECTS = ("transformer", "optimizer", "ddp")


@dataclasses.dataclass
class Fields:
    """Values for the fields of megatron-core's dataclasses, each with its origin."""

    transformer: dict[str, Any] = dataclasses.field(default_factory=dict)
    optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    ddp: dict[str, Any] = dataclasses.field(default_factory=dict)
    sources: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    has_model: bool = True
    has_latents: bool = False
    # The mistakes in the values.
    problems: list[str] = dataclasses.field(default_factory=list)

    def derive(self, target: str, value: object, source: str) -> None:
        subject, _, field = target.partition(".")
        getattr(self, subject)[field] = value
        self.sources[target] = source


def resolve_fields(
    flags: Iterable[Flag], given: Mapping[str, Given], architecture: Architecture | None, platform: Platform
) -> Fields:
    """Resolve the fields of megatron-core's dataclasses that get a value from flags, directly or not.

    Without an architecture, the values that follow from it are omitted; its absence is reported elsewhere.
    """
    fields = _collect_given(flags, given)
    fields.has_model = architecture is not None
    if architecture is not None:
        fields.has_latents = architecture.latents is not None
        for field, value in list_architecture_fields(architecture).items():
            fields.transformer.setdefault(field, value)
        has_bias = architecture.experts is not None and architecture.experts.has_bias
        if has_bias and not fields.transformer["moe_router_bias_update_rate"]:
            fields.notes.append(
                "the bias that helps to choose experts stays what was loaded: --moe-router-bias-update-rate is 0"
            )
    _derive_layout(fields, given, architecture)
    _unwrap_single_values(fields)
    _derive_precision(fields, given)
    if platform.name == "cpu":
        _leave_out_offload(fields)
        _keep_experts_whole(fields, architecture)
    _apply_settled(fields, platform)
    # Megatron's own check raises on the ranks that have a NaN, before the reduction that the others wait in. So instead
    # the norm of the reduced gradients is checked, which is the same on all ranks.
    fields.derive("ddp.check_for_nan_in_grad", False, "the norm of the reduced gradients is checked instead")
    return fields


def build_configs(fields: Fields) -> tuple[dict[str, Any], list[str]]:
    """Build megatron-core's configurations; return them with the reasons why it refuses some.

    A refused configuration is returned as its values.
    """
    built: dict[str, Any] = {}
    refusals = []
    # megatron-core would ask TransformerEngine for its version. If it cannot be used, a check reports that.
    cannot_build = {
        "transformer": not fields.has_model,
        "optimizer": fields.optimizer.get("use_precision_aware_optimizer") and find_engine_refusal() is not None,
    }
    for subject, config in import_configs(fields.has_latents).items():
        values = getattr(fields, subject)
        try:
            if not cannot_build.get(subject):
                built[subject] = config(**values)
                continue
        except Exception as error:
            reason = str(error) or "an assertion without a text"
            name = {"ddp": "data-parallel"}.get(subject, subject)
            refusals.append(f"megatron-core {find_megatron_version()} refuses the {name} configuration: {reason}")
        built[subject] = SimpleNamespace(**(_list_defaults(config) | values))
    return built, refusals


def _list_defaults(config: type) -> dict[str, Any]:
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(config)
    }


def _collect_given(flags: Iterable[Flag], given: Mapping[str, Given]) -> Fields:
    """Collect the values of flags, and the scripts' defaults if they differ from the field's default."""
    defaults = {
        f"{subject}.{field.name}": field.default
        for subject, config in import_configs().items()
        for field in dataclasses.fields(config)
    }
    fields = Fields()
    for flag in flags:
        for target in flag.targets:
            if flag.kind is Kind.USED and target in defaults and flag.default not in (None, defaults[target]):
                origin = "this package" if flag.is_own_default else "Megatron's scripts"
                source = f"default of {origin}"
                fields.derive(target, flag.default, source)
    for target, item in given.items():
        if target.partition(".")[0] in SUBJECTS:
            value = list(item.value) if isinstance(item.value, tuple) else item.value
            fields.derive(target, value, item.source)
    return fields


def _derive_layout(fields: Fields, given: Mapping[str, Given], architecture: Architecture | None) -> None:
    transformer = fields.transformer
    if transformer.get("sequence_parallel") and transformer.get("tensor_model_parallel_size", 1) == 1:
        fields.derive("transformer.sequence_parallel", False, "off: --tensor-model-parallel-size is 1")
        fields.notes.append("--sequence-parallel has no effect with --tensor-model-parallel-size 1")
    stages, source = _count_virtual_stages(fields, given, architecture)
    interleaved = stages is not None and stages > 1
    if interleaved:
        fields.derive("transformer.virtual_pipeline_model_parallel_size", stages, source)
        if "layout.waits_for_stages" in given:
            fields.problems.append(
                f"{given['layout.waits_for_stages'].source} with virtual pipeline stages ({source}) gives wrong "
                "results without an error: drop the flag"
            )
    align = given["ddp.align_param_gather"].value if "ddp.align_param_gather" in given else True
    fields.derive("ddp.align_param_gather", interleaved and align, "on with virtual pipeline stages only")
    if transformer.get("context_parallel_size", 1) > 1:
        asked = given.get("transformer.cp_comm_type")
        if asked is not None and {"a2a"} != set(asked.value):
            fields.notes.append(
                f"without effect here, context-parallel ranks exchange attention's heads: {asked.source}"
            )
        fields.derive("transformer.cp_comm_type", "a2a", "context-parallel ranks exchange attention's heads")


def _count_virtual_stages(
    fields: Fields, given: Mapping[str, Given], architecture: Architecture | None
) -> tuple[int | None, str]:
    """Return the number of virtual stages with the flag that sets it; None without a flag, or if its value is wrong."""
    transformer, problems = fields.transformer, fields.problems
    layers, stages = given.get("layout.layers_per_virtual_stage"), given.get("layout.num_virtual_stages")
    if layers is not None and stages is not None:
        problems.append(f"{layers.source} and {stages.source} set the same number: drop one of them")
    if stages is not None:
        return stages.value, stages.source
    if layers is None or architecture is None:
        return None, ""
    uneven = [
        flag
        for field, flag in (
            ("num_layers_in_first_pipeline_stage", "--decoder-first-pipeline-num-layers"),
            ("num_layers_in_last_pipeline_stage", "--decoder-last-pipeline-num-layers"),
        )
        if field in transformer
    ]
    if uneven:
        problems.append(
            f"{layers.source} needs stages of equal size, and {' and '.join(uneven)} makes them unequal: "
            "write --num-virtual-stages-per-pipeline-rank"
        )
        return None, ""
    per_stage = count_layers(transformer, architecture) // transformer.get("pipeline_model_parallel_size", 1)
    if per_stage % layers.value:
        problems.append(
            f"{layers.source} does not divide the {per_stage} layers of a pipeline stage: write one of "
            f"{list_divisors(per_stage)}"
        )
        return None, ""
    return per_stage // layers.value, layers.source


def list_divisors(*numbers: int) -> str:
    """List the numbers that divide all of these, as text for an error."""
    return ", ".join(str(n) for n in range(1, min(numbers) + 1) if all(number % n == 0 for number in numbers))


def count_layers(transformer: Mapping[str, Any], architecture: Architecture) -> int:
    """Count the layers that stages share, with embedding and loss if they count as layers."""
    extra = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    return architecture.num_layers + sum(bool(transformer.get(field)) for field in extra)


def _unwrap_single_values(fields: Fields) -> None:
    """Unwrap lists of one value: megatron-core reads a list as one value for each layer, or for each loss."""
    for field in ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "cp_comm_type"):
        value = fields.transformer.get(field)
        if isinstance(value, list) and len(value) == 1:
            fields.transformer[field] = value[0]


def _derive_precision(fields: Fields, given: Mapping[str, Given]) -> None:
    for field, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if not fields.transformer.get(field):
            continue
        fields.derive("optimizer.params_dtype", dtype, f"that of --{field}")
        # Gradients are sums over all tokens of an update: float16 cannot hold them at any loss scale.
        if "ddp.grad_reduce_in_fp32" not in given and fields.optimizer.get("main_grads_dtype") in (None, torch.float32):
            fields.derive("ddp.grad_reduce_in_fp32", True, f"on with --{field}")


def _keep_experts_whole(fields: Fields, architecture: Architecture | None) -> None:
    """Keep experts whole on a CPU unless a flag divides them: alltoall does not run there with divided experts."""
    ranks = fields.transformer.get("tensor_model_parallel_size", 1)
    if architecture is None or architecture.experts is None or ranks == 1:
        return
    if "expert_tensor_parallel_size" not in fields.transformer:
        fields.notes.append(f"--expert-tensor-parallel-size is 1 on the platform cpu, and {ranks} on others")
        fields.derive("transformer.expert_tensor_parallel_size", 1, "platform cpu")


def _leave_out_offload(fields: Fields) -> None:
    """Omit offload on a CPU: the optimizer's state is on the host anyway, and float32 needs no other optimizer."""
    kept = [
        name
        for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
        if fields.optimizer.get(name, torch.float32) != torch.float32
    ]
    names = ("optimizer_cpu_offload", "use_precision_aware_optimizer")
    for name in () if kept else names:
        source = fields.sources.get(f"optimizer.{name}")
        if fields.optimizer.get(name) and source is not None:
            fields.notes.append(f"without effect on the platform cpu: {source}")
            fields.derive(f"optimizer.{name}", False, "platform cpu")
    if fields.transformer.get("deterministic_mode"):
        # Megatron would look up rows with weight[ids]; on two threads, the backward of that differs from run to run.
        fields.notes.append(
            f"without effect on the platform cpu, where results are the same without it: "
            f"{fields.sources['transformer.deterministic_mode']}"
        )
        fields.derive("transformer.deterministic_mode", False, "platform cpu")


def _apply_settled(fields: Fields, platform: Platform) -> None:
    """Set the fields that no flag can change, and note each flag that tries to."""
    for field, (value, reason) in settle_fields(fields.transformer, platform).items():
        target = f"transformer.{field}"
        if field in fields.transformer and fields.transformer[field] == value and target in fields.sources:
            continue
        source = fields.sources.get(target, "")
        if isinstance(value, list):
            lost = [item for item in fields.transformer[field] if item not in value]
            source = f"{source.partition(' ')[0]} {' '.join(lost)}"
        if source.startswith("--") and value is not None:
            where = f"on the {reason}" if reason.startswith("platform") else f"here, {reason}"
            fields.notes.append(f"without effect {where}: {source}")
        elif field == "transformer_impl" and platform.name != "cpu":
            fields.notes.append(f"layers are Megatron's own: {reason}")
        fields.derive(target, value, reason)
