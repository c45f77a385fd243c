"""The settings of frozen roles and critic: other architectures, on the policy's ranks and in its precision."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.algorithm.declaration import HEAD
from megatron_rl.algorithm.plug_ins import find_roles
from megatron_rl.algorithm.settings import name_teachers
from megatron_rl.command_line.backends import choose_backends
from megatron_rl.command_line.checks import check_length
from megatron_rl.command_line.mode_checks import check_batch_invariant
from megatron_rl.command_line.model_checks import DIVISION_CHECKS, PP
from megatron_rl.command_line.resolve import build_configs, resolve_fields
from megatron_rl.config.settings import DraftSettings
from megatron_rl.config.trainer import LoraConfig
from megatron_rl.errors import InputError
from megatron_rl.flag import Flag
from megatron_rl.flag_parser import Given
from megatron_rl.platforms import Platform
from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.types import Architecture

_CRITIC = "--critic"
# Values that divide the policy's layers.
_OF_POLICY = (
    "layout.",
    "transformer.num_layers_in_first_pipeline_stage",
    "transformer.num_layers_in_last_pipeline_stage",
    "transformer.account_for_",
    "transformer.pipeline_model_parallel_layout",
)
# Values that concern training alone, and those that concern the policy's routers.
_OF_TRAINING = ("transformer.recompute_",)
_OF_ROUTERS = (
    "transformer.moe_aux_loss_coeff",
    "transformer.moe_z_loss_coeff",
    "transformer.moe_router_bias_update_rate",
)
_OF_EXPERTS = ("transformer.moe_", "transformer.expert_")


def resolve_frozen(
    settings: DraftSettings, flags: Sequence[Flag], given: Mapping[str, Given], platform: Platform, chip: str | None
) -> tuple[dict[str, DraftSettings], list[str]]:
    """Return the settings of frozen roles by the names of their models, and the mistakes in them.

    `settings` are the policy's, which are right so far, with the backends as they were written.
    """
    frozen, problems = dict[str, DraftSettings](), list[str]()
    for role in find_roles(settings.algorithm).values():
        for name, folder in role.find_models(settings.algorithm).items():
            gives_log_probs = role.find_divergence(settings.algorithm) is None
            one, of_one = _resolve(role.flag, folder, gives_log_probs, settings, flags, given, platform, chip)
            problems += of_one
            if one is not None:
                frozen[name] = one
    for folder in name_teachers(settings.algorithm.teacher, are_served=True).values():
        problems += [f"--teacher engines:{folder}: {problem}" for problem in _check_served(folder, settings)]
    return frozen, problems


def _check_served(folder: Path, settings: DraftSettings) -> list[str]:
    """Compare a teacher that engines compute with the policy, if its family is known here: vLLM has more of them."""
    try:
        architecture = read_architecture(folder, flag="--teacher")
    except InputError:
        return []
    length, longest = settings.training.seq_length, architecture.longest_sequence
    problems = _check_vocabulary(True, settings, architecture)
    if length is not None and length >= longest:
        problems.append(f"--seq-length {length} must be below its longest sequence, {longest}: write less")
    return problems


_WHOLE_STATE = dict.fromkeys(
    ("use_distributed_optimizer", "use_precision_aware_optimizer", "optimizer_cpu_offload",
     "use_precision_aware_optimizer_no_fp8_or_ds_fp8"), False,
)  # fmt: skip
"""The options of an optimizer whose state every rank has whole."""


def resolve_critic(
    settings: DraftSettings, flags: Sequence[Flag], given: Mapping[str, Given], platform: Platform, chip: str | None
) -> tuple[DraftSettings | None, list[str]]:
    """Return the critic's settings, likewise: it has no adapters, and its gradients are reduced after the last one.

    A head on the policy has the policy's architecture.
    """
    algorithm, folder = settings.algorithm, settings.model.hf_model
    assert algorithm.critic is not None and folder is not None
    folder = folder if algorithm.critic in ("policy", HEAD) else Path(algorithm.critic)
    ddp = _change(settings.ddp, overlap_grad_reduce=False, overlap_param_gather=False)
    rate = algorithm.critic_lr or settings.optimizer.lr
    least = settings.optimizer.min_lr if rate is None else min(settings.optimizer.min_lr or 0.0, rate)
    own = {"lr": rate, "min_lr": least, "decoupled_lr": None, "decoupled_min_lr": None}
    optimizer = _change(settings.optimizer, overlap_param_gather=False, **own)
    if algorithm.critic == HEAD:
        # Each rank has all of it: Megatron saves no state of a rank that would have no part.
        ddp = _change(ddp, use_distributed_optimizer=False)
        optimizer = _change(optimizer, **_WHOLE_STATE)
    trained = dataclasses.replace(settings, lora=LoraConfig(), ddp=ddp, optimizer=optimizer)
    problems = list[str]()
    if algorithm.critic == HEAD:
        assert settings.architecture is not None
        critic: DraftSettings | None = choose_backends(trained, settings.architecture, chip, problems.extend)
    else:
        critic, problems = _resolve(_CRITIC, folder, True, trained, flags, given, platform, chip)
    if rate is not None and settings.schedule.lr_warmup_init > rate:
        problems.append(
            f"--lr-warmup-init {settings.schedule.lr_warmup_init:g} is above the critic's rate, {rate:g}: write less, "
            "or a larger --critic-lr"
        )
    return critic, problems


def _change(config: Any, **values: Any) -> Any:
    """Return a copy of one of Megatron's configurations with other values."""
    changed = copy.copy(config)
    for name, value in values.items():
        setattr(changed, name, value)
    return changed


def _resolve(
    flag: str,
    folder: Path,
    may_have_padding: bool,
    settings: DraftSettings,
    flags: Sequence[Flag],
    given: Mapping[str, Given],
    platform: Platform,
    chip: str | None,
) -> tuple[DraftSettings | None, list[str]]:
    try:
        architecture = read_architecture(folder, flag=flag)
    except InputError as error:
        return None, [f"{flag} {folder}: {error}"]
    if flag == _CRITIC:
        architecture = dataclasses.replace(architecture, tied_embeddings=True, is_critic=True)
    model = dataclasses.replace(settings.model, hf_model=folder, linear_attention_backend="auto")
    fields = resolve_fields(flags, _select(flag, given, settings, architecture), architecture, platform)
    configs, problems = build_configs(fields)
    draft = dataclasses.replace(settings, model=model, architecture=architecture, transformer=configs["transformer"])
    problems += [problem for check in DIVISION_CHECKS for problem in check(draft, architecture)]
    problems += [*check_length(draft, architecture), *check_batch_invariant(draft)]
    problems += _check_vocabulary(may_have_padding, settings, architecture)
    stages = _count_stages(settings)
    if architecture.num_layers < stages:
        problems.append(f"it has {architecture.num_layers} layers for {stages} stages: lower {PP}, or virtual stages")
    draft = choose_backends(draft, architecture, chip, problems.extend)
    return draft, [f"{flag} {folder}: {problem}" for problem in problems]


def _select(
    flag: str, given: Mapping[str, Given], settings: DraftSettings, architecture: Architecture
) -> dict[str, Given]:
    """Select the values of the policy that are this model's too, and divide its layers over the same stages."""
    left_out = _OF_POLICY + (_OF_ROUTERS if flag == _CRITIC else _OF_TRAINING)
    left_out = left_out if architecture.experts is not None else left_out + _OF_EXPERTS
    selected = {target: one for target, one in given.items() if not target.startswith(left_out)}
    virtual, stages = settings.parallel_sizes.virtual_pipeline, _count_stages(settings)
    if architecture.num_layers % stages:
        # In Megatron's words; the last stages, which have the output layer, get fewer.
        length, rest = divmod(architecture.num_layers, stages)
        layout = "E" + "|".join("t" * (length + (stage < rest)) for stage in range(stages)) + "L"
        selected["transformer.pipeline_model_parallel_layout"] = Given(layout, flag)
    if virtual is not None:
        selected["layout.num_virtual_stages"] = Given(virtual, flag)
    return selected


def _count_stages(settings: DraftSettings) -> int:
    """Count the parts of a pipeline, of which a rank may have several."""
    return settings.parallel_sizes.pipeline * (settings.parallel_sizes.virtual_pipeline or 1)


def _check_vocabulary(may_have_padding: bool, settings: DraftSettings, architecture: Architecture) -> list[str]:
    """Compare the rows of output layers; whether the tokens are the same, the run checks with both tokenizers."""
    policy = settings.architecture
    if policy is None or policy.vocab_size == architecture.vocab_size:
        return []
    if may_have_padding and architecture.vocab_size > policy.vocab_size:
        # It is, since the tokens are the same.
        return []
    more = "" if may_have_padding else ", or --opd-divergence sampled if it has more"
    return [
        f"its vocabulary has {architecture.vocab_size} rows, and the policy's {policy.vocab_size}: write a folder with "
        f"as many{more}"
    ]
