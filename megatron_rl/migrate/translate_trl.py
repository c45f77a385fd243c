"""The command line of this package for a run of TRL's GRPO, DPO or DistillationTrainer, from its config's fields.

TRL counts steps in updates, and so does our schedule; the length of our run counts iterations.
"""

import re
from collections.abc import Mapping

from megatron_rl.algorithm.library import PREFERENCES
from megatron_rl.command_line.checks import list_others
from megatron_rl.errors import InputError
from megatron_rl.migrate.launch_command import STAGE, TEACHER
from megatron_rl.migrate.translation import (
    TheirSettings,
    Translation,
    carry_settings,
    index_flags,
    place_devices,
    read_table,
)

# The average of the loss, by the type of loss.
_AGGREGATIONS: Mapping[str, str] = {
    "dapo": "token", "bnpo": "token", "cispo": "token", "grpo": "sequence", "sapo": "sequence", "dr_grpo": "constant",
}  # fmt: skip
_STYLES: Mapping[str, str] = {
    "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
}  # fmt: skip
_CORRECTION = "vllm_importance_sampling"
# The defaults of DistillationConfig that are others than GRPOConfig's.
_DISTILLED: Mapping[str, str] = {"beta": "1.0", "num_generations": "1"}
# The same of DPOConfig, whose other defaults of sampling and rewards mean nothing.
_PREFERRED: Mapping[str, str] = {
    "beta": "0.1", "loss_type": "sigmoid", "label_smoothing": "0.0", "max_length": "1024", "ref_model": "null",
    "num_generations": "1",
}  # fmt: skip
# Settings of DPO that must have these values, and what to say of others.
_FIXED: Mapping[str, tuple[str, str]] = {
    "f_divergence_type": ("reverse_kl", "the divergence from the reference is the reverse KL"),
    "ld_alpha": ("", "all tokens of a response count alike"),
    "use_weighting": ("false", "pairs have no weights"),
    "sync_ref_model": ("false", "the reference stays as it is"),
    "loss_weights": ("", "a pair has one loss"),
}


def translate_trl(given: Mapping[str, str], script: object) -> Translation:
    """Translate the settings of a run; raise an InputError if none of them is TRL's."""
    table = read_table("trl")
    known = {*table["defaults"], *table["settings"], *table["unsaid"].split(), "reward_funcs", "dataset_name", TEACHER}
    is_dpo = given.get(STAGE) == "dpo"
    given = {key: value for key, value in given.items() if key != STAGE}
    if known.isdisjoint(given):
        raise InputError(
            f"{script} has no setting of TRL's GRPOConfig: write a script of slime, Megatron-LM, verl, NeMo-RL or TRL"
        )
    defaults = table["defaults"] | (_DISTILLED if TEACHER in given else _PREFERRED if is_dpo else {})
    theirs, to = TheirSettings(given, defaults), Translation(table["title"])
    num_updates = _write_sizes(theirs, to)
    if TEACHER in given:
        _write_teacher(theirs, to)
    elif is_dpo:
        _write_preferences(theirs, to)
    else:
        _write_advantage(theirs, to)
        _write_loss(theirs, to)
        _write_divergence(theirs, to, num_updates)
        _write_entropy(theirs, to)
        _write_correction(theirs, to)
    _write_schedule(theirs, to)
    if not theirs.is_on("fp16") and theirs.text("bf16").lower() in ("", "true"):
        to.write("--bf16")
    elif theirs.is_on("fp16"):
        to.write("--fp16")
    _write_intervals(theirs, to, num_updates)
    _write_rewards(theirs, to)
    _write_data(theirs, to)
    carry_settings(table, theirs, to)
    if is_dpo:
        to.ranks = theirs.count("num_processes") or 1
        others = {*list_others()["dpo"]}
        to.words = {name: words for name, words in to.words.items() if others.isdisjoint(index_flags()[name].targets)}
        return to
    engines = theirs.text("vllm_mode") if theirs.is_on("use_vllm") else ""
    _place(theirs.count("num_processes") or 1, engines, theirs.is_on("vllm_enable_sleep_mode"), to)
    return to


def _place(num_processes: int, engines: str, sleep: bool, to: Translation) -> None:
    """Place ranks and engines: TRL's engines are servers, or share the devices of the processes that train."""
    if engines == "colocate":
        of_engine = to.count("--rollout-tensor-parallel-size", 1) or 1
        to.ranks = num_processes
        to.write("--rollout-colocate", *(["sleep"] if sleep else []))
        # They share accelerators, which this machine may not have.
        to.write("--platform", "cuda")
        to.write_unless_default("--rollout-num-engines", max(1, num_processes // of_engine))
        return
    place_devices(to, 1, num_processes, is_shared=engines != "server")


def _write_rewards(theirs: TheirSettings, to: Translation) -> None:
    """Write reward functions whose file is known, and require the others."""
    functions = re.findall(r"[^\s,\[\]'\"]+", theirs.text("reward_funcs"))
    weights = re.findall(r"[\d.eE+-]+", theirs.text("reward_weights"))
    if len(weights) == len(functions):
        functions = [f"{function}={weight}" for function, weight in zip(functions, weights, strict=True)]
    if functions and all(".py:" in function for function in functions):
        to.write("--reward", *functions)
    elif functions:
        files = " ".join(map(_place_function, functions))
        to.require(
            f"reward_funcs = {theirs.text('reward_funcs')}: write --reward {files}, where FILE.py has the function and "
            "trains nothing when it is imported",
            "--reward",
        )


def _place_function(function: str) -> str:
    """Return FILE.py:NAME for a function of TRL; the user chooses the name if it has none, or is a model."""
    if ".py:" in function:
        return function
    name, *weight = function.split("=")
    is_named = re.fullmatch(r"[\w.]+", name) is not None
    return "=".join([f"FILE.py:{name.rpartition('.')[2] if is_named else 'NAME'}", *weight])


def _write_data(theirs: TheirSettings, to: Translation) -> None:
    """Write data sets that are files of rows, and require files of the others."""
    for keys, flag, file in (
        (("train_dataset", "dataset_name"), "--prompts", "train.jsonl"),
        (("eval_dataset",), "--eval-prompts", "test.jsonl"),
    ):
        for key in keys:
            text = theirs.text(key)
            if text.endswith((".jsonl", ".parquet")):
                to.write(flag, *text.split())
            elif text:
                to.require(
                    f'{key} = {text}: write its rows to a file, DATASET.to_json("{file}"), and {flag} {file}', flag
                )


def _write_sizes(theirs: TheirSettings, to: Translation) -> int:
    """Write the sizes of an iteration and of an update; return the number of updates of an iteration."""
    of_device, num_devices = theirs.count("per_device_train_batch_size"), theirs.count("num_processes")
    num_accumulated, group = theirs.count("gradient_accumulation_steps"), theirs.count("num_generations")
    if "num_processes" not in theirs.given:
        to.notes.append("The settings do not say how many processes TRL has: counted as 1.")
    if of_device is None or num_devices is None or num_accumulated is None or group is None:
        to.require("the sizes of a batch are not all numbers: write --grpo-prompts-per-step", "--grpo-prompts-per-step")
        return 1
    of_step = of_device * num_devices
    whole = theirs.count("generation_batch_size")
    whole = (theirs.count("steps_per_generation") or num_accumulated) * of_step if whole is None else whole
    of_update = of_step * num_accumulated
    if whole < of_update:
        to.changed.append(
            f"an update of {of_update} responses takes several batches of {whole}, all of the same weights: here it is "
            "one iteration"
        )
        whole = of_update
    if whole % group:
        to.require(
            f"{whole} responses are not a multiple of the {group} of a group: write --grpo-prompts-per-step",
            "--grpo-prompts-per-step",
        )
    else:
        to.write("--grpo-prompts-per-step", whole // group)
    to.write("--global-batch-size", of_update)
    to.write("--micro-batch-size", of_device)
    return max(1, whole // of_update)


def _write_teacher(theirs: TheirSettings, to: Translation) -> None:
    """Write a teacher whose distribution is learned; `beta` chooses the divergence from it."""
    to.write("--algorithm", "opd")
    to.write("--teacher", theirs.text(TEACHER))
    weight = theirs.number("beta")
    if weight is None or not 0 <= weight <= 1:
        to.require(
            f"beta = {theirs.text('beta')} must be a number from 0 to 1: write --opd-divergence", "--opd-divergence"
        )
    else:
        to.write("--opd-divergence", {0.0: "forward", 1.0: "reverse"}.get(weight, "jsd"))
        if 0 < weight < 1:
            to.write_unless_default("--opd-mixture", weight)


def _write_preferences(theirs: TheirSettings, to: Translation) -> None:
    to.write("--stage", "dpo")
    kinds = re.findall(r"[\w-]+", theirs.text("loss_type"))
    if len(kinds) == 1 and kinds[0] in PREFERENCES:
        to.write_unless_default("--dpo-loss-type", kinds[0])
    else:
        to.require(
            f"loss_type = {theirs.text('loss_type')} is not known here: write --dpo-loss-type "
            f"{' or '.join(PREFERENCES)}",
            "--dpo-loss-type",
        )
    to.write_unless_default("--dpo-beta", theirs.text("beta"))
    if theirs.number("label_smoothing"):
        to.changed.append(
            f"label_smoothing = {theirs.text('label_smoothing')}: TRL's losses of these names do not read it"
        )
    if theirs.text("max_length"):
        to.write("--seq-length", theirs.text("max_length"))
        to.changed.append(
            f"max_length = {theirs.text('max_length')}: TRL cuts longer sequences, this package leaves out the pair"
        )
    reference = theirs.text("ref_model")
    if reference.startswith("<"):
        to.changed.append(
            f"ref_model = {reference[1:-1]}: write --grpo-ref-model and its folder, unless --hf-model names it"
        )
    elif reference:
        to.write("--grpo-ref-model", reference)
    for key, (value, meaning) in _FIXED.items():
        if key in theirs.given and theirs.text(key).lower() != value:
            to.changed.append(f"{key} = {theirs.text(key)}: {meaning}")


def _write_advantage(theirs: TheirSettings, to: Translation) -> None:
    scale = {"true": "group", "false": "none"}.get(theirs.text("scale_rewards").lower(), theirs.text("scale_rewards"))
    together = theirs.text("multi_objective_aggregation")
    if together == "normalize_then_sum":
        to.write("--grpo-advantage", "gdpo")
    elif scale in ("group", "none"):
        to.write_unless_default("--grpo-advantage", "grpo" if scale == "group" else "mean")
    else:
        to.write("--grpo-advantage", "batch")
        to.changed.append(
            f"scale_rewards = {scale}: TRL divides by the deviation of rewards, --grpo-advantage batch by that of "
            "rewards minus their group's mean"
        )
    if scale == "group":
        to.changed.append(
            "scale_rewards = group: TRL divides by the sample's deviation plus 1e-4, this package by the population's "
            "plus 1e-6, which makes advantages of n responses larger by the root of n / (n - 1)"
        )
    weights = theirs.text("reward_weights")
    if weights and "reward_funcs" not in theirs.given:
        to.changed.append(f"reward_weights = {weights}: write a function's weight after it, --reward NAME=WEIGHT")


def _write_loss(theirs: TheirSettings, to: Translation) -> None:
    kind, level = theirs.text("loss_type"), theirs.text("importance_sampling_level")
    if kind not in _AGGREGATIONS:
        to.require(f"loss_type = {kind} is not known here: write --grpo-loss and --grpo-aggregation", "--grpo-loss")
        return
    to.write_unless_default("--grpo-aggregation", _AGGREGATIONS[kind])
    if kind == "bnpo":
        to.changed.append("loss_type = bnpo: TRL averages over the tokens of a micro-batch, this package of an update")
    lower, upper = theirs.text("epsilon"), theirs.text("epsilon_high") or theirs.text("epsilon")
    if kind == "sapo":
        to.write("--grpo-loss", "sapo")
        to.write_unless_default("--sapo-temperature-pos", theirs.text("sapo_temperature_pos"))
        to.write_unless_default("--sapo-temperature-neg", theirs.text("sapo_temperature_neg"))
    elif kind == "cispo":
        _write_cispo(theirs, to)
    else:
        to.write_unless_default("--grpo-loss", "gspo" if level == "sequence" else "clip")
        to.write_unless_default("--grpo-clamp-eps-lower", lower)
        to.write_unless_default("--grpo-clamp-eps-upper", upper)
        if theirs.text("delta"):
            to.write("--grpo-dual-clip", theirs.text("delta"))
    if kind in ("sapo", "cispo") and level != "token":
        to.changed.append(f"importance_sampling_level = {level}: with {kind} each token has its own ratio")


def _write_cispo(theirs: TheirSettings, to: Translation) -> None:
    """Write the bounds of CISPO: TRL's is the largest ratio itself, ours is its distance above 1."""
    largest = theirs.number("epsilon_high") or theirs.number("epsilon")
    to.write("--grpo-loss", "cispo")
    to.write("--grpo-clamp-eps-lower", 1)
    if largest is not None and largest >= 1:
        to.write("--grpo-clamp-eps-upper", largest - 1)
    else:
        to.require(
            f"epsilon_high = {theirs.text('epsilon_high') or theirs.text('epsilon')} is the largest ratio with cispo: "
            "write --grpo-clamp-eps-upper, how far above 1 it is",
            "--grpo-clamp-eps-upper",
        )


def _write_divergence(theirs: TheirSettings, to: Translation, num_updates: int) -> None:
    if theirs.number("beta") == 0:
        return
    to.write("--grpo-kl-beta", theirs.text("beta"))
    to.write("--grpo-kl-estimator", "unbiased" if theirs.is_on("use_bias_correction_kl") else "k3")
    if theirs.is_on("sync_ref_model"):
        updates, part = theirs.count("ref_model_sync_steps"), theirs.number("ref_model_mixup_alpha")
        if part != 1:
            to.changed.append(
                f"sync_ref_model = true: TRL mixes {part:g} of the policy into the reference every {updates} updates; "
                "write --grpo-ref-interval, which copies the policy whole after that number of iterations"
            )
        elif updates:
            to.write("--grpo-ref-interval", max(1, updates // num_updates))


def _write_entropy(theirs: TheirSettings, to: Translation) -> None:
    weight = theirs.text("entropy_coef")
    if theirs.number("entropy_coef") == 0:
        return
    to.write("--grpo-entropy-coef", weight)
    if theirs.text("loss_type") not in ("dapo", "cispo"):
        to.changed.append(
            f"entropy_coef = {weight}: TRL averages the entropy over tokens, this package as --grpo-aggregation says"
        )


def _write_correction(theirs: TheirSettings, to: Translation) -> None:
    """Write the correction for the engines' log-probs, which TRL applies if vLLM samples."""
    if not theirs.is_on("use_vllm") or not theirs.is_on(f"{_CORRECTION}_correction"):
        return
    level, _, mode = theirs.text(f"{_CORRECTION}_mode").partition("_")
    to.write("--rl-inference-logprobs-is-correction")
    to.write_unless_default("--grpo-correction-level", level)
    largest = theirs.text(f"{_CORRECTION}_cap") or theirs.text(f"{_CORRECTION}_clip_max")
    smallest = theirs.text(f"{_CORRECTION}_clip_min")
    if largest:
        to.write("--rl-importance-sampling-truncation-coef", largest)
    if smallest:
        to.write("--grpo-correction-lower", smallest)
    if largest or smallest:
        to.write_unless_default("--grpo-correction-mode", mode)


def _write_schedule(theirs: TheirSettings, to: Translation) -> None:
    style = theirs.text("lr_scheduler_type").lower().removeprefix("schedulertype.")
    if style in _STYLES:
        to.write_unless_default("--lr-decay-style", _STYLES[style])
    else:
        to.changed.append(f"lr_scheduler_type = {style}: write --lr-decay-style")
    warmup = theirs.number("warmup_steps")
    if warmup is not None and warmup >= 1 and style != "constant":
        to.write("--lr-warmup-iters", int(warmup))
    elif style != "constant" and (warmup or theirs.number("warmup_ratio")):
        to.write("--lr-warmup-fraction", theirs.text("warmup_steps" if warmup else "warmup_ratio"))
    if not theirs.text("optim").startswith("adamw"):
        to.changed.append(f"optim = {theirs.text('optim')}: the optimizer is AdamW; write --optimizer sgd for SGD")


def _write_intervals(theirs: TheirSettings, to: Translation, num_updates: int) -> None:
    """Write counts of iterations in place of counts of updates; an evaluation samples as training does."""
    for key, flag in (("max_steps", "--train-iters"), ("save_steps", "--save-interval"),
                      ("logging_steps", "--log-interval"), ("eval_steps", "--eval-interval")):  # fmt: skip
        if key not in theirs.given:
            continue
        count = theirs.count(key)
        if count is None:
            to.write(flag, theirs.text(key))
        elif count > 0:
            to.write(flag, max(1, count // num_updates))
    if "--train-iters" not in to.words:
        epochs = theirs.text("num_train_epochs")
        to.changed.append(f"num_train_epochs = {epochs}: a run ends after --train-iters, which counts iterations")
    if theirs.text("eval_strategy") != "no":
        to.write("--eval-temperature", theirs.text("temperature"))
        to.write("--eval-num-samples", theirs.text("num_generations_eval") or theirs.text("num_generations"))
