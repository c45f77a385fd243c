"""The command line of this package for a run of verl, whose settings are Hydra's overrides.

verl's schedules count training steps, and a step is all updates of an iteration; ours count updates.
"""

import ast
from collections.abc import Mapping

from megatron_rl.migrate.translation import TheirSettings, Translation, carry_settings, place_devices, read_table

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_OPTIM, _CORRECTION = f"{_ACTOR}.optim", "algorithm.rollout_correction"
_ADVANTAGES: Mapping[str, str] = {
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "global",
    "reinforce_plus_plus_baseline": "batch",
    "gdpo": "gdpo",
}
_AGGREGATIONS: Mapping[str, str] = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum-norm": "constant",
}
# Types of a divergence in the loss; a plus after one gives it the gradient of k2.
_ESTIMATORS: Mapping[str, str] = {
    "low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2", "mse+": "k2", "k2+": "k2",
    "low_var_kl+": "k3+", "k3+": "k3+", "kl+": "k3+", "k1+": "k3+",
}  # fmt: skip

# Metrics of the filter of groups that are the reward with all its parts.
_SUMS = ("seq_reward", "seq_final_reward")

_DISTILLATION = "distillation."
_OF_LOSS = f"{_DISTILLATION}distillation_loss."
# The settings of distillation that are carried over, or named.
_CARRIED = (
    "distillation.enabled", "loss_mode", "topk", "use_policy_gradient", "use_policy_loss", "use_task_rewards",
    "distillation_loss_coef",
)  # fmt: skip


def translate_verl(given: Mapping[str, str]) -> Translation:
    table = read_table("verl")
    theirs, to = TheirSettings(given, table["defaults"]), Translation(table["title"])
    is_megatron = theirs.text(f"{_ACTOR}.strategy") == "megatron" or any(f"{_ACTOR}.megatron." in key for key in given)
    is_megatron = is_megatron or given.get("model_engine") == "megatron"
    theirs.text("model_engine")
    _write_sizes(theirs, to)
    has_rewards = _write_distillation(theirs, to)
    if has_rewards:
        _write_advantage(theirs, to)
    _write_filter(theirs, to)
    _write_loss(theirs, to)
    _write_divergence(theirs, to)
    _write_correction(theirs, to)
    _write_optimizer(theirs, to, is_megatron)
    _write_schedule(theirs, to, is_megatron)
    _write_precision(theirs, to, is_megatron)
    _write_intervals(theirs, to)
    if has_rewards:
        _require_reward(theirs, to)
    nodes, per_node = theirs.count("trainer.nnodes") or 1, theirs.count("trainer.n_gpus_per_node") or 1
    carry_settings(table, theirs, to)
    place_devices(to, nodes, per_node, is_shared=True)
    return to


def _require_reward(theirs: TheirSettings, to: Translation) -> None:
    """Require a reward: verl chooses one by the rows' data_source, unless the run has a function of its own."""
    file, name = theirs.text("custom_reward_function.path"), theirs.text("custom_reward_function.name")
    name = name or "compute_score"
    module = file.rsplit("/", 1)[-1].removesuffix(".py") or "verl.utils.reward_score"
    function = name if file else "default_compute_score"
    where = f"is beside {file} and " if file else ""
    to.require(
        f"verl's reward reads reward_model.ground_truth of each row: write --reward FILE.py:reward, where FILE.py "
        f"{where}has `from {module} import {function}` and `reward = from_verl({function})` (docs/rewards.md); for a "
        "ready-made reward copy ground_truth into a column of its own, and write --answer-key COLUMN",
        "--reward",
    )


def _write_sizes(theirs: TheirSettings, to: Translation) -> None:
    """Write the sizes of an iteration and of an update; verl counts prompts in both."""
    to.write("--grpo-prompts-per-step", theirs.text("data.train_batch_size"))
    prompts, group = theirs.count(f"{_ACTOR}.ppo_mini_batch_size"), theirs.count(f"{_ROLLOUT}.n")
    if f"{_ROLLOUT}.n" in theirs.given or theirs.text("algorithm.adv_estimator") == "gae":
        to.write("--grpo-group-size", theirs.text(f"{_ROLLOUT}.n"))
    else:
        group = None
        to.require(
            f"{_ROLLOUT}.n is missing, and verl's default is 1, which leaves none to compare with: write "
            "--grpo-group-size, the responses to a prompt",
            "--grpo-group-size",
        )
    if prompts is None or group is None:
        written = theirs.text(f"{_ACTOR}.ppo_mini_batch_size")
        to.require(
            f"ppo_mini_batch_size = {written} counts prompts: write --global-batch-size, which counts responses",
            "--global-batch-size",
        )
    else:
        to.write("--global-batch-size", prompts * group)
    if theirs.is_on(f"{_ACTOR}.use_dynamic_bsz"):
        to.write("--max-tokens-per-gpu", theirs.text(f"{_ACTOR}.ppo_max_token_len_per_gpu"))
    elif theirs.text(f"{_ACTOR}.ppo_micro_batch_size_per_gpu"):
        to.write("--micro-batch-size", theirs.text(f"{_ACTOR}.ppo_micro_batch_size_per_gpu"))


def _write_distillation(theirs: TheirSettings, to: Translation) -> bool:
    """Write teachers and the divergence from them; return whether rewards count beside it, or alone."""
    given = [key for key in theirs.given if key.startswith(_DISTILLATION)]
    read = {key.removeprefix(_OF_LOSS): theirs.text(key) for key in given if key.startswith(_OF_LOSS)}
    paths = {key.split(".")[-2]: theirs.text(key) for key in given if key.endswith(".model_path")}
    is_on, has_rewards = theirs.is_on(f"{_DISTILLATION}enabled"), True
    if is_on:
        # Two names, of which verl has had the second one since May 2026.
        has_rewards = not {read.get(name, "").lower() for name in ("use_policy_loss", "use_task_rewards")} & {"false"}
        if not has_rewards:
            to.write("--grpo-advantage", "none")
        if len(paths) > 1:
            to.write("--teacher", *(f"{name}={path}" for name, path in paths.items()))
            to.require(
                "a row's column `teacher` chooses one of several teachers: write a name of --teacher into each row"
            )
        else:
            to.write("--teacher", *paths.values())
        if has_rewards and "distillation_loss_coef" in read:
            to.write("--opd-coef", read["distillation_loss_coef"])
        _write_distance(read, to)
    for key in given:
        if is_on and key.removeprefix(_OF_LOSS) in ("loss_max_clamp", "log_prob_min_clamp") and theirs.text(key):
            to.changed.append(f"{key} = {theirs.text(key)}: divergences and log-probs are not bounded")
        elif not is_on or (key.removeprefix(_OF_LOSS) not in _CARRIED and not key.endswith(".model_path")):
            theirs.text(key)
            to.meaningless.append(key)
    return has_rewards


def _write_distance(read: Mapping[str, str], to: Translation) -> None:
    mode, top = read.get("loss_mode", "k3"), read.get("topk", "32")
    is_by_gradient = read.get("use_policy_gradient", "").lower() == "true"
    if mode in ("k1", "kl") and is_by_gradient:
        to.write_unless_default("--opd-divergence", "sampled")
    elif mode == "forward_kl_topk" and not is_by_gradient:
        to.write("--opd-divergence", "forward")
        to.write("--opd-top-k", top)
        to.changed.append(
            f"loss_mode = {mode}: verl leaves tokens out that are not among the teacher's {top} likeliest, here they "
            "count together as one"
        )
    else:
        to.require(
            f"loss_mode = {mode} with use_policy_gradient = {str(is_by_gradient).lower()} is not known here: write "
            "--opd-divergence",
            "--opd-divergence",
        )


def _write_advantage(theirs: TheirSettings, to: Translation) -> None:
    estimator = theirs.text("algorithm.adv_estimator")
    if estimator == "gae":
        _write_critic(theirs, to)
        return
    if estimator not in _ADVANTAGES:
        to.require(
            f"algorithm.adv_estimator = {estimator} is not known here: write --grpo-advantage or --algorithm",
            "--grpo-advantage",
            "--algorithm",
        )
        return
    if theirs.number("algorithm.gamma") != 1:
        to.changed.append(f"algorithm.gamma = {theirs.text('algorithm.gamma')}: rewards are not discounted")
    advantage = _ADVANTAGES[estimator]
    if estimator == "grpo" and not theirs.is_on("algorithm.norm_adv_by_std_in_grpo"):
        advantage = "mean"
    to.write_unless_default("--grpo-advantage", advantage)
    if advantage in ("global", "batch", "gdpo"):
        to.changed.append(
            f"algorithm.adv_estimator = {estimator}: verl takes mean and deviation over tokens, this package over "
            "responses"
        )
    elif advantage == "grpo":
        to.changed.append(
            "algorithm.adv_estimator = grpo: verl divides by the sample's deviation, this package by the population's, "
            "which makes advantages of n responses larger by the root of n / (n - 1)"
        )


def _write_critic(theirs: TheirSettings, to: Translation) -> None:
    to.write("--grpo-advantage", "gae")
    if folder := theirs.text("critic.model.path"):
        to.write("--critic", folder)
    else:
        to.require("critic.model.path is missing: write --critic with a folder, or --critic policy", "--critic")
    to.write("--critic-lr", theirs.text("critic.optim.lr"))
    to.write("--critic-clip", theirs.text("critic.cliprange_value"))
    to.write("--gae-lambda", theirs.text("algorithm.lam"))
    to.write_unless_default("--gae-discount", theirs.text("algorithm.gamma"))
    # verl counts steps from 1, and trains the policy from this one on.
    warmup = theirs.count("trainer.critic_warmup")
    to.write_unless_default("--critic-warmup-iters", str(max(0, (warmup or 1) - 1)))
    if theirs.is_on("algorithm.use_kl_in_reward"):
        to.changed.append(
            "algorithm.use_kl_in_reward = true: verl adds the divergence to the rewards that the critic learns, this "
            "package to the advantages of its token and of those before it"
        )
    to.changed.append(
        "algorithm.adv_estimator = gae: verl takes mean and deviation of a batch's advantages off, this package keeps "
        "them as they are; the critic begins with values of 0"
    )


def _write_filter(theirs: TheirSettings, to: Translation) -> None:
    """Write the reward that must differ within a group; `carry_settings` writes whether one must."""
    if not theirs.is_on("algorithm.filter_groups.enable"):
        return
    metric = theirs.text("algorithm.filter_groups.metric")
    if metric in _SUMS:
        to.write("--grpo-filter-by", "sum")
        if metric == "seq_final_reward" and theirs.is_on("algorithm.use_kl_in_reward"):
            to.changed.append(
                f"algorithm.filter_groups.metric = {metric}: the compared rewards do not include the divergence"
            )
    elif metric:
        to.changed.append(
            f"algorithm.filter_groups.metric = {metric}: the first function of --reward is compared, with gdpo any; "
            "write --grpo-filter-by with the name of another one"
        )
    limit = theirs.count("algorithm.filter_groups.max_num_gen_batches")
    if limit:
        to.changed.append(
            f"algorithm.filter_groups.max_num_gen_batches = {limit}: write --grpo-spare-prompts, in prompts"
        )


def _write_loss(theirs: TheirSettings, to: Translation) -> None:
    mode, average = theirs.text(f"{_ACTOR}.policy_loss.loss_mode"), theirs.text(f"{_ACTOR}.loss_agg_mode")
    if mode not in ("vanilla", "gspo", "sapo", "cispo"):
        to.require(f"policy_loss.loss_mode = {mode} is not known here: write --grpo-loss", "--grpo-loss")
        return
    to.write_unless_default("--grpo-loss", "clip" if mode == "vanilla" else mode)
    if mode != "sapo":
        to.write_unless_default("--grpo-clamp-eps-lower", theirs.text(f"{_ACTOR}.clip_ratio_low") or "0.2")
        to.write_unless_default("--grpo-clamp-eps-upper", theirs.text(f"{_ACTOR}.clip_ratio_high") or "0.2")
        if f"{_ACTOR}.clip_ratio" in theirs.given:
            to.changed.append(
                f"{_ACTOR}.clip_ratio = {theirs.text(f'{_ACTOR}.clip_ratio')}: verl reads clip_ratio_low and "
                "clip_ratio_high in its place, which are 0.2 by default; write --grpo-clamp-eps-lower and "
                "--grpo-clamp-eps-upper if it was meant"
            )
    else:
        to.write_unless_default("--sapo-temperature-pos", theirs.text(f"{_ACTOR}.tau_pos"))
        to.write_unless_default("--sapo-temperature-neg", theirs.text(f"{_ACTOR}.tau_neg"))
    if mode == "vanilla":
        to.write("--grpo-dual-clip", theirs.text(f"{_ACTOR}.clip_ratio_c"))
    if mode in ("gspo", "sapo"):
        to.write("--grpo-aggregation", "sequence")
        has_terms = theirs.is_on(f"{_ACTOR}.use_kl_loss") or theirs.number(f"{_ACTOR}.entropy_coeff") not in (0, None)
        if average != "seq-mean-token-mean" and has_terms:
            to.changed.append(
                f"loss_agg_mode = {average}: with {mode} verl averages only divergence and entropy by it; this "
                "package averages all terms over responses' means"
            )
    elif average in _AGGREGATIONS:
        to.write_unless_default("--grpo-aggregation", _AGGREGATIONS[average])
    else:
        to.require(f"loss_agg_mode = {average} is not known here: write --grpo-aggregation", "--grpo-aggregation")


def _write_divergence(theirs: TheirSettings, to: Translation) -> None:
    """Write the divergence; verl may have one in the loss and one in the reward, this package has one."""
    _write_divergence_in_loss(theirs, to)
    if theirs.is_on("algorithm.use_kl_in_reward"):
        _write_divergence_in_reward(theirs, to)


def _write_divergence_in_reward(theirs: TheirSettings, to: Translation) -> None:
    weight, kind = theirs.text("algorithm.kl_ctrl.kl_coef"), theirs.text("algorithm.kl_penalty")
    if theirs.number("algorithm.kl_ctrl.kl_coef") == 0:
        return
    if "--grpo-kl-beta" in to.words:
        to.changed.append(
            "algorithm.use_kl_in_reward = true: use_kl_loss has a divergence too, and this package has one; write "
            f"--grpo-kl-in reward --grpo-kl-estimator k1 --grpo-kl-beta {weight} in place of that in the loss"
        )
        return
    # A number without gradient, so the plus changes nothing.
    if kind.removesuffix("+") not in ("kl", "k1"):
        to.changed.append(
            f"algorithm.kl_penalty = {kind}: in the reward only k1 pulls towards the reference, so it is left out; "
            f"write --grpo-kl-in reward --grpo-kl-beta {weight}"
        )
        return
    to.write("--grpo-kl-beta", weight)
    to.write("--grpo-kl-in", "reward")
    to.write("--grpo-kl-estimator", "k1")
    if theirs.text("algorithm.kl_ctrl.type") != "fixed":
        target, horizon = (theirs.text(f"algorithm.kl_ctrl.{name}") for name in ("target_kl", "horizon"))
        to.changed.append(
            f"algorithm.kl_ctrl.type = {theirs.text('algorithm.kl_ctrl.type')}, target_kl = {target}, horizon = "
            f"{horizon}: the weight stays {weight}"
        )
    if theirs.text("algorithm.adv_estimator") not in ("reinforce_plus_plus", "gae"):
        to.changed.append(
            "algorithm.use_kl_in_reward = true: verl takes a response's whole divergence from its reward before "
            "advantages are made, this package from a token's advantage that of the token and of those after it"
        )


def _write_divergence_in_loss(theirs: TheirSettings, to: Translation) -> None:
    if not theirs.is_on(f"{_ACTOR}.use_kl_loss") or theirs.number(f"{_ACTOR}.kl_loss_coef") == 0:
        return
    weight, kind = theirs.text(f"{_ACTOR}.kl_loss_coef"), theirs.text(f"{_ACTOR}.kl_loss_type")
    if kind in _ESTIMATORS:
        to.write("--grpo-kl-beta", weight)
        to.write("--grpo-kl-estimator", _ESTIMATORS[kind])
    elif kind in ("kl", "k1"):
        to.changed.append(
            f"kl_loss_type = {kind}: the mean of its gradient is 0, so it is left out; write --grpo-kl-beta {weight} "
            "for a divergence that holds the policy"
        )
    else:
        to.changed.append(f"kl_loss_type = {kind}: write --grpo-kl-beta {weight} and --grpo-kl-estimator")


def _write_correction(theirs: TheirSettings, to: Translation) -> None:
    level = theirs.text(f"{_CORRECTION}.rollout_is")
    if level:
        to.write("--rl-inference-logprobs-is-correction")
        to.write_unless_default("--grpo-correction-level", level)
        lower, _, upper = theirs.text(f"{_CORRECTION}.rollout_is_threshold").rpartition("_")
        to.write("--rl-importance-sampling-truncation-coef", upper)
        if lower:
            to.write("--grpo-correction-lower", lower)
        if theirs.is_on(f"{_CORRECTION}.rollout_is_batch_normalize"):
            to.changed.append("rollout_is_batch_normalize = true: weights are not divided by their mean")
    rejection = theirs.text(f"{_CORRECTION}.rollout_rs")
    if rejection:
        to.changed.append(f"rollout_rs = {rejection}: write --grpo-reject-below and --grpo-reject-above")
    if theirs.is_on(f"{_CORRECTION}.bypass_mode"):
        to.changed.append("bypass_mode = true: ratios are taken to the trainer's own log-probs")


def _write_optimizer(theirs: TheirSettings, to: Translation, is_megatron: bool) -> None:
    to.write("--lr", theirs.text(f"{_OPTIM}.lr"))
    name = theirs.text(f"{_OPTIM}.optimizer")
    if name.lower() not in ("adam", "adamw"):
        to.changed.append(f"{_OPTIM}.optimizer = {name}: the optimizer is AdamW; write --optimizer sgd for SGD")
    betas = ast.literal_eval(theirs.text(f"{_OPTIM}.betas").replace("(", "[").replace(")", "]"))
    to.write_unless_default("--adam-beta1", betas[0])
    to.write_unless_default("--adam-beta2", betas[1])
    decay = theirs.all[f"{_OPTIM}.weight_decay"]
    if not is_megatron and decay not in ("0", "0.0"):
        to.changed.append(
            f"{_OPTIM}.weight_decay = {decay}: verl on FSDP decays norms and biases too, this package matrices alone"
        )
    if f"{_ACTOR}.grad_clip" in theirs.given:
        value = theirs.text(f"{_ACTOR}.grad_clip")
        to.changed.append(
            f"{_ACTOR}.grad_clip = {value}: verl reads optim.clip_grad; write --clip-grad if it was meant"
        )


def _write_schedule(theirs: TheirSettings, to: Translation, is_megatron: bool) -> None:
    """Write the learning rate's schedule, with updates in place of training steps."""
    prompts, of_update = theirs.count("data.train_batch_size"), theirs.count(f"{_ACTOR}.ppo_mini_batch_size")
    num_updates = max(1, prompts // of_update) if prompts and of_update else None
    style = theirs.text(f"{_OPTIM}.lr_decay_style")
    if not is_megatron:
        style = theirs.text(f"{_OPTIM}.warmup_style") or theirs.text(f"{_OPTIM}.lr_scheduler_type")
    to.write("--lr-decay-style", style)
    for key, flag in (("lr_warmup_steps", "--lr-warmup-iters"), ("lr_decay_steps", "--lr-decay-iters")):
        steps = theirs.count(f"{_OPTIM}.{key}")
        if steps is not None and steps > 0 and (is_megatron or key == "lr_warmup_steps"):
            if num_updates is None:
                to.require(f"{key} = {steps} counts iterations: write {flag}, which counts updates", flag)
            else:
                to.write(flag, steps * num_updates)
    if "--lr-warmup-iters" not in to.words and theirs.number(f"{_OPTIM}.lr_warmup_steps_ratio") not in (0, None):
        to.write("--lr-warmup-fraction", theirs.text(f"{_OPTIM}.lr_warmup_steps_ratio"))
    if is_megatron:
        to.write_unless_default("--lr-warmup-init", theirs.text(f"{_OPTIM}.lr_warmup_init"))
        to.write_unless_default("--min-lr", theirs.text(f"{_OPTIM}.min_lr"))
        to.write_unless_default("--weight-decay-incr-style", theirs.text(f"{_OPTIM}.weight_decay_incr_style"))
        return
    ratio, rate = theirs.number(f"{_OPTIM}.min_lr_ratio"), theirs.number(f"{_OPTIM}.lr")
    if style == "cosine":
        if ratio and rate is not None:
            to.write("--min-lr", ratio * rate)
        cycles = theirs.number(f"{_OPTIM}.num_cycles")
        if cycles != 0.5:
            to.changed.append(f"{_OPTIM}.num_cycles = {cycles:g}: the cosine falls once, as with 0.5")


def _write_precision(theirs: TheirSettings, to: Translation, is_megatron: bool) -> None:
    key = f"{_ACTOR}.megatron.dtype" if is_megatron else f"{_ACTOR}.fsdp_config.dtype"
    flag = {"bfloat16": "--bf16", "bf16": "--bf16", "float16": "--fp16", "fp16": "--fp16"}.get(theirs.text(key))
    if flag is not None:
        to.write(flag)
    stored = theirs.text(f"{_ACTOR}.fsdp_config.model_dtype")
    if not is_megatron and stored not in ("fp32", "float32"):
        to.changed.append(f"fsdp_config.model_dtype = {stored}: the optimizer's weights are float32")


def _write_intervals(theirs: TheirSettings, to: Translation) -> None:
    for key, flag in (("trainer.save_freq", "--save-interval"), ("trainer.test_freq", "--eval-interval")):
        if theirs.count(key) != -1 and theirs.text(key):
            to.write(flag, theirs.text(key))
    steps = theirs.text("trainer.total_training_steps")
    if steps:
        to.write("--train-iters", steps)
        return
    epochs = theirs.text("trainer.total_epochs")
    to.changed.append(f"trainer.total_epochs = {epochs}: a run ends after --train-iters, which counts iterations")
