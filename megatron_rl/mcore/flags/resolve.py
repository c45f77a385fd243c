"""What Megatron's flags come to together, as fields of megatron-core's dataclasses."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megatron_rl.errors import UsageError
from megatron_rl.flags import Flag, Kind
from megatron_rl.mcore.flags import generated
from megatron_rl.mcore.flags.fields import OWN_DEFAULTS
from megatron_rl.mcore.flags.given import Given
from megatron_rl.types import Architecture

SUBJECTS = ("transformer", "optimizer", "ddp")


@dataclasses.dataclass
class Fields:
    """Values for the fields of megatron-core's dataclasses, with where each came from."""

    transformer: dict[str, Any]
    optimizer: dict[str, Any]
    ddp: dict[str, Any]
    sources: dict[str, str]
    notes: list[str]

    def derive(self, target: str, value: object, source: str) -> None:
        subject, _, field = target.partition(".")
        getattr(self, subject)[field] = value
        self.sources[target] = source


def resolve(flags: Iterable[Flag], given: Mapping[str, Given], architecture: Architecture, version: str) -> Fields:
    """The fields of megatron-core's dataclasses that flags, or what follows from them, give a value."""
    fields = _start(flags, given)
    _layout(fields, given, architecture, version)
    _single_values(fields)
    _precision(fields, given)
    return fields


def _start(flags: Iterable[Flag], given: Mapping[str, Given]) -> Fields:
    """What flags say, and what Megatron's scripts take without the flag where that is not the field's default."""
    defaults = {
        f"{subject}.{field.name}": field.default
        for subject, config in generated.configs().items()
        for field in dataclasses.fields(config)
    }
    fields = Fields({}, {}, {}, {}, [])
    for flag in flags:
        for target in flag.targets:
            if flag.kind is Kind.USED and target in defaults and flag.default not in (None, defaults[target]):
                ours = target.partition(".")[2] in OWN_DEFAULTS
                source = "default of this package" if ours else "default of Megatron's scripts"
                fields.derive(target, flag.default, source)
    for target, item in given.items():
        if target.partition(".")[0] in SUBJECTS:
            value = list(item.value) if isinstance(item.value, tuple) else item.value
            fields.derive(target, value, item.source)
    return fields


def _layout(fields: Fields, given: Mapping[str, Given], architecture: Architecture, version: str) -> None:
    transformer = fields.transformer
    if transformer.get("sequence_parallel") and transformer.get("tensor_model_parallel_size", 1) == 1:
        fields.derive("transformer.sequence_parallel", False, "off: --tensor-model-parallel-size is 1")
        fields.notes.append("--sequence-parallel has no effect with --tensor-model-parallel-size 1")
    stages, source = _virtual_stages(transformer, given, architecture)
    if stages is not None and stages > 1:
        fields.derive("transformer.virtual_pipeline_model_parallel_size", stages, source)
        overlap = transformer.get("overlap_p2p_comm", True)
        overlap_source = fields.sources.get("transformer.overlap_p2p_comm", source)
    else:
        if "transformer.overlap_p2p_comm" in given:
            fields.notes.append("--no-overlap-p2p-communication has no effect without virtual pipeline stages")
        overlap, overlap_source = False, "off: there are no virtual pipeline stages"
    fields.derive("transformer.overlap_p2p_comm", overlap, overlap_source)
    fields.derive("transformer.batch_p2p_comm", not overlap, "the opposite of overlap_p2p_comm")
    interleaved = "virtual_pipeline_model_parallel_size" in transformer
    align = given["ddp.align_param_gather"].value if "ddp.align_param_gather" in given else True
    fields.derive("ddp.align_param_gather", interleaved and align, "on with virtual pipeline stages only")
    # Up to 0.18 the interleaved schedule frees outputs that it still needs: losses are wrong, and nothing says so.
    keep = interleaved and tuple(int(part) for part in version.split(".")[:2]) < (0, 19)
    fields.derive("transformer.deallocate_pipeline_outputs", not keep, "on where the schedule allows it")
    if transformer.get("pipeline_model_parallel_size", 1) > 1:
        fields.derive("transformer.variable_seq_lengths", True, "packed groups differ in length")
    if transformer.get("context_parallel_size", 1) > 1 and "transformer.cp_comm_type" not in given:
        fields.derive("transformer.cp_comm_type", "a2a", "context-parallel ranks exchange attention's heads")


def _virtual_stages(
    transformer: Mapping[str, Any], given: Mapping[str, Given], architecture: Architecture
) -> tuple[int | None, str]:
    layers, stages = given.get("layout.layers_per_virtual_stage"), given.get("layout.num_virtual_stages")
    if layers is not None and stages is not None:
        raise UsageError(f"{layers.source} and {stages.source} say the same thing in two ways: drop one of them")
    if stages is not None:
        return stages.value, stages.source
    if layers is None:
        return None, ""
    for field, flag in (
        ("num_layers_in_first_pipeline_stage", "--decoder-first-pipeline-num-layers"),
        ("num_layers_in_last_pipeline_stage", "--decoder-last-pipeline-num-layers"),
    ):
        if field in transformer:
            raise UsageError(
                f"{layers.source} wants as many layers in every stage, and {flag} says otherwise: "
                "write --num-virtual-stages-per-pipeline-rank"
            )
    size = transformer.get("pipeline_model_parallel_size", 1)
    per_stage = _counted_layers(transformer, architecture) // size
    if layers.value < 1 or per_stage % layers.value:
        choices = ", ".join(str(n) for n in range(1, per_stage + 1) if per_stage % n == 0)
        raise UsageError(
            f"{layers.source} does not divide the {per_stage} layers of a pipeline stage: write one of {choices}"
        )
    return per_stage // layers.value, layers.source


def _counted_layers(transformer: Mapping[str, Any], architecture: Architecture) -> int:
    extra = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    return architecture.num_layers + sum(bool(transformer.get(field)) for field in extra)


def _single_values(fields: Fields) -> None:
    """megatron-core reads a list as a value a layer, or a loss."""
    for field in ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "cp_comm_type"):
        value = fields.transformer.get(field)
        if isinstance(value, list) and len(value) == 1:
            fields.transformer[field] = value[0]


def _precision(fields: Fields, given: Mapping[str, Given]) -> None:
    for field, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if not fields.transformer.get(field):
            continue
        fields.derive("optimizer.params_dtype", dtype, f"that of --{field}")
        # Gradients are sums over all tokens of an update: more than float16 holds, at any loss scale.
        if "ddp.grad_reduce_in_fp32" not in given and fields.optimizer.get("main_grads_dtype") in (None, torch.float32):
            fields.derive("ddp.grad_reduce_in_fp32", True, f"on with --{field}")
    if fields.transformer.get("fp16") and fields.optimizer.get("loss_scale") is None:
        # A NaN in a gradient is how dynamic loss scaling learns that the scale is too large.
        fields.derive("ddp.check_for_nan_in_grad", False, "off with --fp16 and dynamic loss scaling")
