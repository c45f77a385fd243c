"""Optimizer, schedule and division of a NeMo-RL run, for each of its two backends.

Schedules count iterations there, and updates here.
"""

import re
from collections.abc import Sequence

from megatron_rl.migrate.translation import TheirSettings, Translation

MEGATRON, DTENSOR = "policy.megatron_cfg", "policy.dtensor_cfg"
_SCHEDULE, _TORCH = f"{MEGATRON}.scheduler", "policy.optimizer.kwargs"


def write_megatron(theirs: TheirSettings, to: Translation, num_updates: float) -> None:
    style, rise = (
        theirs.text(f"{_SCHEDULE}.{key}") or otherwise
        for key, otherwise in (("lr_decay_style", "linear"), ("weight_decay_incr_style", "constant"))
    )
    to.write("--lr-decay-style", style)
    for key, flag in (("lr_warmup_iters", "--lr-warmup-iters"), ("lr_decay_iters", "--lr-decay-iters")):
        count = theirs.count(f"{_SCHEDULE}.{key}")
        if count and (style != "constant" or key == "lr_warmup_iters"):
            to.write(flag, int(count * num_updates))
    first, smallest = theirs.text(f"{_SCHEDULE}.lr_warmup_init"), theirs.text(f"{MEGATRON}.optimizer.min_lr")
    if first and "--lr-warmup-iters" in to.words:
        to.write_unless_default("--lr-warmup-init", first)
    if smallest and style != "constant":
        to.write_unless_default("--min-lr", smallest)
    # The schedule's weight decay replaces the optimizer's.
    start, end, decay = (
        theirs.text(f"{MEGATRON}.{key}weight_decay") for key in ("scheduler.start_", "scheduler.end_", "optimizer.")
    )
    if rise != "constant":
        to.write("--weight-decay-incr-style", rise)
        to.write("--start-weight-decay", start)
        to.write("--end-weight-decay", end)
    elif end or decay:
        to.write("--weight-decay", end or decay)
    momentum = theirs.text(f"{MEGATRON}.optimizer.sgd_momentum")
    if theirs.text(f"{MEGATRON}.optimizer.optimizer") == "sgd":
        to.write("--sgd-momentum", momentum)
    granularity = theirs.text(f"{MEGATRON}.recompute_granularity") or "full"
    modules = re.findall(r"\w+", theirs.text(f"{MEGATRON}.recompute_modules"))
    if theirs.is_on(f"{MEGATRON}.activation_checkpointing"):
        _write_recomputation(to, granularity, modules)
    split, of_experts, of_groups = (
        theirs.text(f"{MEGATRON}.{kind}_parallel_size") for kind in ("tensor_model", "expert_tensor", "expert_model")
    )
    if of_experts not in ("", split) and of_groups not in ("", "1"):
        to.write("--expert-tensor-parallel-size", of_experts)
    elif of_experts not in ("", split):
        to.changed.append(
            f"{MEGATRON}.expert_tensor_parallel_size = {of_experts}: write --expert-tensor-parallel-size if the model "
            "has experts"
        )


def _write_recomputation(to: Translation, granularity: str, modules: Sequence[str] = ()) -> None:
    to.write("--recompute-granularity", granularity)
    if granularity == "full":
        to.write("--recompute-method", "uniform")
        to.write("--recompute-num-layers", 1)
    elif modules:
        to.write("--recompute-modules", *modules)


def write_dtensor(theirs: TheirSettings, to: Translation, num_updates: float) -> None:
    to.notes.append("NeMo-RL trains with DTensor, this package with Megatron; the parallel sizes are the same.")
    optimizer, decay = theirs.text("policy.optimizer.name"), theirs.number(f"{_TORCH}.weight_decay")
    if not optimizer.endswith(("AdamW", "FusedAdam")):
        to.changed.append(f"policy.optimizer.name = {optimizer}: the optimizer is AdamW; write --optimizer sgd for SGD")
    betas = re.findall(r"[\d.e-]+", theirs.text(f"{_TORCH}.betas"))
    if "policy.max_grad_norm" in theirs.given:
        # Without a norm NeMo-RL does not clip.
        to.write("--clip-grad", theirs.text("policy.max_grad_norm") or 0)
    for flag, beta in zip(("--adam-beta1", "--adam-beta2"), betas, strict=False):
        to.write_unless_default(flag, beta)
    if decay:
        to.changed.append(
            f"{_TORCH}.weight_decay = {decay:g}: NeMo-RL on DTensor decays norms and biases too, this package matrices "
            "alone"
        )
    _write_phases(theirs, to, num_updates)
    if theirs.is_on(f"{DTENSOR}.activation_checkpointing"):
        _write_recomputation(to, "full")


def _write_phases(theirs: TheirSettings, to: Translation, num_updates: float) -> None:
    """Write a warm-up, and what follows it, of PyTorch's schedulers."""
    texts = {key: theirs.text(key) for key in theirs.given if key.startswith("policy.scheduler.")}
    names = {key.removesuffix(".name"): text.rpartition(".")[2] for key, text in texts.items() if key.endswith(".name")}

    def read(phase: str, field: str, default: float) -> float:
        key = f"{phase}.kwargs.{field}"
        number = theirs.number(key)
        if number is None and theirs.text(key):
            to.changed.append(f"{key} = {theirs.text(key)}: it must be a number, and counts as {default:g}")
        return default if number is None else number

    phases, warmup = [*names], 0
    if phases and names[phases[0]] == "LinearLR" and read(phases[0], "end_factor", 1) == 1:
        first = phases.pop(0)
        length = read(first, "total_iters", 5)
        warmup = int(length * num_updates)
        to.write("--lr-warmup-iters", warmup)
        for key in (key for key in texts if key.endswith(".milestones")):
            if (ends := re.findall(r"\d+", texts[key])) and int(ends[0]) != length:
                to.changed.append(f"{key} = {texts[key]}: here the next phase begins after the warm-up's total_iters")
        rate = theirs.number(f"{_TORCH}.lr") or 0.0
        to.write_unless_default("--lr-warmup-init", rate * read(first, "start_factor", 1 / 3))
    last = phases[0] if len(phases) == 1 else ""
    if names.get(last) == "CosineAnnealingLR":
        to.write("--lr-decay-style", "cosine")
        to.write("--lr-decay-iters", warmup + int(read(last, "T_max", 0) * num_updates))
        to.write_unless_default("--min-lr", read(last, "eta_min", 0.0))
        return
    to.write("--lr-decay-style", "constant")
    if phases and (names.get(last) != "ConstantLR" or read(last, "factor", 1 / 3) != 1):
        to.changed.append(f"policy.scheduler = {', '.join(names.values())}: write --lr-decay-style")
