"""The command line of this package for a run of NeMo-RL: GRPO, PPO, distillation, DPO or supervised fine-tuning.

NeMo-RL's schedules count iterations, whatever its backend; ours count updates.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.command_line.checks import list_others
from megatron_rl.errors import InputError
from megatron_rl.migrate.nemo_config import PROGRAMS
from megatron_rl.migrate.nemo_training import DTENSOR, MEGATRON, write_dtensor, write_megatron
from megatron_rl.migrate.translation import (
    TheirSettings,
    Translation,
    carry_settings,
    index_flags,
    place_devices,
    read_table,
)

_SAMPLED = ("grpo", "ppo", "distillation")
_LOSSES: Mapping[str, Sequence[str]] = {"ppo": ("loss_fn", "value_loss_fn")} | dict.fromkeys(
    _SAMPLED[::2], ("loss_fn",)
)
_OF_DISTANCE = ("loss_fn.kl_type", "loss_fn.mixed_kl_weight", "loss_fn.zero_outside_topk")
_ENGINES, _KL = "policy.generation", "loss_fn.reference_policy_kl"
_TEACHERS = "on_policy_distillation.teacher_model_by_agent_name."
_CORRECTIONS = {"tis": "truncate", "icepop": "mask"}
# The columns of rows, each with its flag.
_COLUMNS: Mapping[str, Mapping[str, str]] = {
    "grpo": {"input": "--prompt-key", "output": "--answer-key"},
    "sft": {"input": "--prompt-key", "output": "--completion-key", "chat": "--messages-key"},
    "dpo": {each: f"--{each}-key" for each in ("prompt", "chosen", "rejected")},
}
_EMPTY = ("null", "", "{}", "[]")
# Sections that have an effect although `enabled` is false.
_READ = (MEGATRON, DTENSOR, f"{_ENGINES}.colocated", "checkpointing")
# Sections of which a part is read, and what to say of the rest.
_PARTS: Mapping[str, str] = {
    "teacher": "The teacher is divided over the ranks as the policy is: its other settings have no effect.",
    "on_policy_distillation": "The teachers share the policy's ranks: their other settings have no effect.",
    "value": "The critic has the policy's schedule, optimizer and division: its other settings have no effect.",
}


def translate_nemo(settings: Mapping[str, str], program: str, source: object) -> Translation:
    """Translate the settings of a config; `program` chooses the algorithm if no section does."""
    name = _choose_algorithm(settings, program, source)
    table = _choose_table(name)
    is_megatron = settings.get(f"{MEGATRON}.enabled", "").lower() == "true"
    idle = _list_idle(settings, name, table["blocks"].split(), is_megatron)
    inner = tuple(f"{section}." for section in (*idle, *_PARTS))
    given = {key: text for key, text in settings.items() if not key.startswith(inner)}
    theirs, to = TheirSettings(given, table["defaults"]), Translation(table["title"])
    num_updates = _write_sizes(theirs, to, name)
    if name == "distillation":
        _write_teacher(theirs, to, settings)
    elif name not in _SAMPLED:
        to.write("--stage", name)
    else:
        _write_advantage(theirs, to, name, settings)
        _write_loss(theirs, to)
        _write_divergence(theirs, to, theirs.text(f"{name}.adv_estimator.name"))
        _write_correction(theirs, to)
        _write_filter(theirs, to, name)
    # Each epoch over an iteration's responses is a step of the schedules there.
    write_training = write_megatron if is_megatron else write_dtensor
    write_training(theirs, to, num_updates / (theirs.count(f"{name}.ppo_epochs") or 1))
    _write_intervals(theirs, to, name)
    _write_data(theirs, to, name)
    places = _read_places(theirs)
    empty = [key for key, text in given.items() if text in _EMPTY and key not in {*theirs.asked, *table["settings"]}]
    theirs.asked.update(empty)
    to.meaningless += empty
    carry_settings(table, theirs, to)
    if name in _SAMPLED:
        _require_reward(to, settings)
        _place(to, *places)
    else:
        others = {*list_others()[name]}
        to.words = {flag: words for flag, words in to.words.items() if others.isdisjoint(index_flags()[flag].targets)}
        to.nodes, to.ranks = places[:2]
    to.notes += (text for part, text in _PARTS.items() if any(key.startswith(f"{part}.") for key in settings))
    to.meaningless = _shorten([*to.meaningless, *(f"{section}.*" for section in idle)])
    return to


def _choose_algorithm(settings: Mapping[str, str], program: str, source: object) -> str:
    sections = {key.split(".")[0] for key in settings}
    name = next((name for name in PROGRAMS if name in sections), program.removeprefix("run_"))
    for section in ("policy", name):
        if settings.get(section, "{}") != "{}":
            raise InputError(f"{source}: {section} = {settings[section]} must be a section, with `key: value` lines")
    # A distillation with a gold loss learns rows of a data set, from teachers with other tokenizers.
    if name not in PROGRAMS or "policy" not in sections or "loss_fn.gold_loss" in settings:
        raise InputError(
            f"{source} is not a config of NeMo-RL's {', '.join(PROGRAMS)}: its other programs have no counterpart here"
        )
    return name


def _choose_table(name: str) -> Mapping[str, Any]:
    """Return the table of one algorithm: with its own defaults, and its section in place of the star."""
    table, sections = read_table("nemo"), (name, *_LOSSES.get(name, ()))
    defaults = {
        key: value for key, value in table["defaults"].items() if key.split(".")[0] in sections
        and (not key.startswith("loss_fn.") or (key in _OF_DISTANCE) == (name == "distillation"))
    }  # fmt: skip
    settings = {key.replace("*", name): entry for key, entry in table["settings"].items()}
    return {**table, "defaults": defaults, "settings": settings, "unsaid": table["unsaid"].replace("*.", f"{name}.")}


def _list_idle(settings: Mapping[str, str], name: str, blocks: Sequence[str], is_megatron: bool) -> list[str]:
    """List the sections that have no effect as a whole, without those within another one."""
    off = {key.removesuffix(".enabled") for key, text in settings.items()
           if key.endswith(".enabled") and text.lower() == "false"}  # fmt: skip
    unused = {"policy.optimizer", "policy.scheduler", DTENSOR} if is_megatron else {MEGATRON}
    unused |= set() if name in _SAMPLED else {_ENGINES, "env"}
    others = {*PROGRAMS, "loss_fn", "value_loss_fn"} - {name, *_LOSSES.get(name, ())}
    idle = off - {*_READ} | unused | others | {*blocks}
    return sorted(
        section for section in idle
        if any(key.startswith(f"{section}.") for key in settings)
        and not any(section.startswith(f"{other}.") for other in (*idle, *_PARTS))
    )  # fmt: skip


def _shorten(keys: Sequence[str]) -> list[str]:
    """Return the settings of each section as one text, section.{a,b}."""
    names: dict[str, list[str]] = {}
    for key in dict.fromkeys(keys):
        names.setdefault(key.rpartition(".")[0], []).append(key.rpartition(".")[2])
    return [f"{section}.{{{','.join(found)}}}" if len(found) > 1 else f"{section}.{found[0]}".lstrip(".")
            for section, found in names.items()]  # fmt: skip


def _write_sizes(theirs: TheirSettings, to: Translation, name: str) -> float:
    """Write the sizes of an iteration and of an update; return the number of updates of an iteration."""
    packing = [f"policy.{part}" for part in ("sequence_packing", "dynamic_batching")]
    tokens = [theirs.text(f"{part}.train_mb_tokens") for part in packing if theirs.is_on(f"{part}.enabled")]
    for flag, text in (
        ("--global-batch-size", theirs.text("policy.train_global_batch_size")),
        ("--max-tokens-per-gpu" if tokens else "--micro-batch-size",
         [*tokens, theirs.text("policy.train_micro_batch_size")][0]),
        ("--seq-length", theirs.text("policy.max_total_sequence_length")),
    ):  # fmt: skip
        if text:
            to.write(flag, text)
    if name in _SAMPLED:
        _write_lengths(theirs, to)
    if name not in _SAMPLED or "--max-prompt-tokens" in to.words:
        to.notes.append(
            "Rows that are too long keep their place in NeMo-RL's batches, without weight; here others have it."
        )
    if name not in _SAMPLED:
        theirs.text("data.max_input_seq_length")
        return 1
    to.write("--grpo-prompts-per-step", theirs.text(f"{name}.num_prompts_per_step"))
    prompts, group = (theirs.count(f"{name}.num_{part}") for part in ("prompts_per_step", "generations_per_prompt"))
    size = theirs.count("policy.train_global_batch_size")
    if prompts is None or group is None or not size:
        to.require("the sizes of a batch are not all numbers: write --global-batch-size", "--global-batch-size")
        return 1
    return max(1, prompts * group // size)


def _write_lengths(theirs: TheirSettings, to: Translation) -> None:
    """Write the lengths of prompt and response: there they share a sequence, here each has its limit."""
    whole = theirs.count("policy.max_total_sequence_length") or 0
    response, prompt = (
        theirs.count(key) or whole for key in (f"{_ENGINES}.max_new_tokens", "data.max_input_seq_length")
    )
    if response < whole:
        to.write("--rollout-max-tokens", response)
    if prompt < whole:
        to.write("--max-prompt-tokens", min(prompt, whole - response) if response < whole else prompt)
    if response + prompt > whole and (prompt < whole or response >= whole):
        room = "half of them" if prompt >= whole else "what the longest prompt leaves"
        to.changed.append(
            f"max_new_tokens = {response}, max_input_seq_length = {prompt}: NeMo-RL's responses have what prompts "
            f"leave of {whole} tokens, here {response if response < whole else room}; write --rollout-max-tokens and "
            "--max-prompt-tokens"
        )


def _write_teacher(theirs: TheirSettings, to: Translation, settings: Mapping[str, str]) -> None:
    to.write("--algorithm", "opd")
    to.write("--teacher", settings.get("teacher.model_name", ""))
    kind, part = theirs.text("loss_fn.kl_type"), theirs.number("loss_fn.mixed_kl_weight")
    if kind == "mixed" and part in (0, 1):
        kind = "forward" if part else "reverse"
    if kind in ("forward", "reverse"):
        to.write("--opd-divergence", kind)
    else:
        to.require(
            f"loss_fn.kl_type = {kind}, mixed_kl_weight = {theirs.text('loss_fn.mixed_kl_weight')}: the weighted sum "
            "of both divergences is not known here: write --opd-divergence forward, reverse or jsd",
            "--opd-divergence",
        )
    top = theirs.text("distillation.topk_logits_k")
    to.write("--opd-top-k", top)
    to.changed.append(
        f"distillation.topk_logits_k = {top}: NeMo-RL divides the probabilities of the teacher's likeliest tokens by "
        "their sum, here all other tokens count together as one"
    )


def _write_advantage(theirs: TheirSettings, to: Translation, name: str, settings: Mapping[str, str]) -> None:
    section = f"{name}.adv_estimator"
    kind, is_first = theirs.text(f"{section}.name"), theirs.is_on(f"{section}.minus_baseline")
    is_scaled, is_apart = (
        theirs.is_on(f"{section}.{key}") for key in ("normalize_rewards", "use_leave_one_out_baseline")
    )
    for key, value in (("normalize_rewards", is_scaled), ("use_leave_one_out_baseline", is_apart)):
        if name == "grpo" and theirs.is_on(f"grpo.{key}") != value:
            to.changed.append(
                f"grpo.{key} = {theirs.text(f'grpo.{key}')}: NeMo-RL's advantages read {section}.{key} in its place"
            )
    if kind == "gae":
        _write_critic(theirs, to, settings)
    elif kind == "grpo":
        to.write_unless_default("--grpo-advantage", "grpo" if is_scaled else "rloo" if is_apart else "mean")
    elif kind == "gdpo":
        to.write("--grpo-advantage", "gdpo")
        to.changed.append(
            "adv_estimator.name = gdpo: NeMo-RL divides by the deviation over an iteration's responses, this package "
            "over an update's"
        )
        if not is_scaled:
            to.changed.append(
                "adv_estimator.normalize_rewards = false: --grpo-advantage gdpo divides each function's rewards by "
                "their deviation in a group"
            )
    elif kind == "reinforce_plus_plus":
        to.write("--grpo-advantage", "batch" if is_first else "global")
        to.changed.append(
            "adv_estimator.name = reinforce_plus_plus: NeMo-RL takes mean and deviation over an iteration's tokens, "
            "this package divides by the deviation over an update's alone"
        )
    elif kind == "opd":
        teachers = {key.removeprefix(_TEACHERS): text for key, text in settings.items() if key.startswith(_TEACHERS)}
        to.write("--grpo-advantage", "none")
        to.write("--teacher", *map("=".join, teachers.items()) if len(teachers) > 1 else teachers.values())
        if len(teachers) > 1:
            to.require(
                "a row's column `teacher` chooses one of several teachers: write a name of --teacher into each row"
            )
    else:
        to.require(f"adv_estimator.name = {kind} is not known here: write --grpo-advantage", "--grpo-advantage")
    if kind in ("grpo", "gdpo") and is_scaled:
        over = "mean and deviation are over the group's other responses" if is_apart else "deviation is over the group"
        to.changed.append(
            f"adv_estimator.name = {kind}: NeMo-RL's {over}, with the sample's deviation, this package's over the "
            "group with the population's"
        )


def _write_critic(theirs: TheirSettings, to: Translation, settings: Mapping[str, str]) -> None:
    to.write("--grpo-advantage", "gae")
    folder = settings.get("value.model_name", "")
    to.write("--critic", "policy" if folder == settings.get("policy.model_name") else folder)
    is_megatron = settings.get("value.megatron_cfg.enabled", "").lower() == "true"
    if rate := settings.get("value.megatron_cfg.optimizer.lr" if is_megatron else "value.optimizer.kwargs.lr"):
        to.write("--critic-lr", rate)
    whole, values, policy = (theirs.text(f"ppo.adv_estimator.gae_lambda{end}") for end in ("", "_value", "_policy"))
    alpha = theirs.text("ppo.adv_estimator.length_adaptive_alpha")
    if alpha and theirs.number("ppo.adv_estimator.length_adaptive_alpha") != 0:
        to.write("--gae-length-alpha", alpha)
    else:
        to.write_unless_default("--gae-lambda", policy or whole)
    if values or policy or "--gae-length-alpha" in to.words:
        to.write("--critic-lambda", values or whole)
    if theirs.is_on("ppo.adv_estimator.normalize_advantages"):
        to.changed.append(
            "adv_estimator.normalize_advantages = true: NeMo-RL takes mean and deviation of a batch's advantages off, "
            "this package keeps them as they are"
        )


def _write_loss(theirs: TheirSettings, to: Translation) -> None:
    is_whole, dual = theirs.is_on("loss_fn.sequence_level_importance_ratios"), theirs.text("loss_fn.ratio_clip_c")
    kind = "cispo" if theirs.is_on("loss_fn.use_cispo") else "gspo" if is_whole else "clip"
    kind = "reinforce" if theirs.is_on("loss_fn.disable_ppo_ratio") else kind
    bounds = [theirs.text(f"loss_fn.ratio_clip_{end}") for end in ("min", "max")]
    to.write_unless_default("--grpo-loss", kind)
    to.write_unless_default("--grpo-aggregation", "token" if theirs.is_on("loss_fn.token_level_loss") else "sequence")
    if kind != "reinforce":
        to.write_unless_default("--grpo-clamp-eps-lower", bounds[0])
        to.write_unless_default("--grpo-clamp-eps-upper", bounds[1])
    if dual and kind != "reinforce":
        to.write("--grpo-dual-clip", dual)
    elif dual:
        to.changed.append(f"ratio_clip_c = {dual}: without ratios no token is clipped")


def _write_divergence(theirs: TheirSettings, to: Translation, estimator: str) -> None:
    weight, kind = theirs.text(f"{_KL}_penalty"), theirs.text(f"{_KL}_type")
    is_weighed = theirs.is_on("loss_fn.use_on_policy_kl_approximation")
    bounds = [f"{key} = {theirs.text(f'loss_fn.{key}')}" for key in ("kl_input_clamp_value", "kl_output_clamp_value")
              if theirs.text(f"loss_fn.{key}")]  # fmt: skip
    is_reward = theirs.is_on("loss_fn.use_kl_in_reward")
    if theirs.number(f"{_KL}_penalty") == 0:
        return
    if is_reward and (estimator not in ("gae", "reinforce_plus_plus") or kind != "k1"):
        to.changed.append(
            f"use_kl_in_reward = true, reference_policy_kl_type = {kind}: the divergence is left out, "
            + (
                "since in the reward only k1 pulls towards the reference"
                if kind != "k1"
                else f"as {estimator} does there"
            )
            + f"; write --grpo-kl-in reward --grpo-kl-beta {weight}"
        )
        return
    to.write("--grpo-kl-beta", weight)
    if is_reward:
        to.write("--grpo-kl-in", "reward")
        to.write("--grpo-kl-estimator", "k1")
        where = "the rewards that the critic learns" if estimator == "gae" else "the advantage of its token alone"
        to.changed.append(
            f"use_kl_in_reward = true: NeMo-RL adds a token's divergence to {where}, this package to the advantages of "
            "its token and of those before it"
        )
        return
    # NeMo-RL's weights of 1 have the gradient of a score function, with which k3's gradient is that of k2.
    to.write("--grpo-kl-estimator", "k2" if kind == "k2" else "unbiased" if is_weighed else "k3+")
    if kind != "k3":
        term = "whose mean is 0" if kind == "k1" else "which k2 lacks here"
        to.changed.append(f"reference_policy_kl_type = {kind}: NeMo-RL's gradient has a score function's term, {term}")
    if is_weighed:
        to.changed.append(
            "use_on_policy_kl_approximation = true: NeMo-RL's weights are to the engines' log-probs, this package's to "
            "the old policy's"
        )
    if bounds:
        to.changed.append(f"{', '.join(bounds)}: divergences are not bounded")


def _write_correction(theirs: TheirSettings, to: Translation) -> None:
    """Write the weights of the trainer's log-probs against the engines'."""
    kind, most, least = (
        theirs.text(f"loss_fn.truncated_importance_sampling_{end}") for end in ("type", "ratio", "ratio_min")
    )
    if not theirs.is_on("loss_fn.use_importance_sampling_correction"):
        return
    to.write("--rl-inference-logprobs-is-correction")
    if theirs.is_on("loss_fn.sequence_level_importance_ratios"):
        to.write("--grpo-correction-level", "sequence")
    if kind == "seq-mask-tis":
        to.write("--grpo-reject-below", least)
        to.write("--grpo-reject-above", most)
    elif kind in _CORRECTIONS:
        to.write("--rl-importance-sampling-truncation-coef", most)
        to.write_unless_default("--grpo-correction-mode", _CORRECTIONS[kind])
        if least:
            to.write("--grpo-correction-lower", least)
    elif kind:
        to.changed.append(f"truncated_importance_sampling_type = {kind}: write --grpo-correction-mode and its bounds")


def _write_filter(theirs: TheirSettings, to: Translation, name: str) -> None:
    """Write how many prompts may replace groups without a signal."""
    batches, part = (theirs.number(f"{name}.{key}") for key in ("dynamic_sampling_max_gen_batches", "batch_multiplier"))
    prompts = theirs.count(f"{name}.num_prompts_per_step")
    if not theirs.is_on(f"{name}.use_dynamic_sampling"):
        return
    if not (batches and part and prompts):
        to.changed.append("dynamic_sampling_max_gen_batches must be a number: write --grpo-spare-prompts")
    else:
        to.write("--grpo-spare-prompts", max(1, int(prompts * batches * part) - prompts))
        to.changed.append(
            f"dynamic_sampling_max_gen_batches = {batches:g}: NeMo-RL stops after these, here groups without a signal "
            "fill the iteration"
        )


def _write_intervals(theirs: TheirSettings, to: Translation, name: str) -> None:
    """Write how long a run is, when it saves and evaluates, and where it logs."""
    precision, epochs = theirs.text("policy.precision"), theirs.text(f"{name}.max_num_epochs")
    if precision in ("bfloat16", "bf16", "float16", "fp16"):
        to.write("--bf16" if precision.startswith("b") else "--fp16")
    to.changed.append(
        f"{name}.max_num_epochs = {epochs}: NeMo-RL ends after these too, this package after --train-iters alone"
    )
    saved = [theirs.text(f"checkpointing.{key}") for key in ("checkpoint_dir", "save_period")]
    if theirs.is_on("checkpointing.enabled"):
        to.write("--save", saved[0])
        to.write("--save-interval", saved[1])
    if (theirs.number(f"{name}.val_period") or 0) > 0:
        to.write("--eval-interval", theirs.text(f"{name}.val_period"))
    warmth = theirs.text(f"{_ENGINES}.val_temperature") or theirs.text(f"{_ENGINES}.temperature")
    to.write_unless_default("--eval-temperature", warmth or "1")
    if most := theirs.text(f"{name}.max_val_samples"):
        to.write("--eval-num-prompts", most)
    if tokens := re.findall(r"\d+", theirs.text(f"{_ENGINES}.stop_token_ids")):
        to.write("--rollout-stop-tokens", *tokens)
    project, run, folder = (theirs.text(f"logger.{key}") for key in ("wandb.project", "wandb.name", "log_dir"))
    if theirs.is_on("logger.wandb_enabled"):
        to.write("--wandb-project", project)
        to.write("--wandb-exp-name", run)
    if theirs.is_on("logger.tensorboard_enabled"):
        to.write("--tensorboard-dir", folder)


def _write_data(theirs: TheirSettings, to: Translation, name: str) -> None:
    """Write data sets that are files of rows, with their columns, and require files of the others."""
    ends = (".data_path", ".dataset_name", ".env_name", ".processor")
    texts = {key: theirs.text(key) for key in theirs.given if key.startswith("data.") and key.endswith(ends)}
    for part, flag, file in (("train", "--prompts", "train.jsonl"), ("validation", "--eval-prompts", "test.jsonl")):
        of_part = {key: text for key, text in texts.items() if text and key.startswith(f"data.{part}.")}
        files, sets = ([text for key, text in of_part.items() if key.endswith(end)] for end in ends[:2])
        if files and all(text.endswith((".jsonl", ".parquet")) for text in files):
            to.write(flag, *files)
        elif files or sets:
            to.require(f"data.{part} = {', '.join(files or sets)}: write its rows to a file, and {flag} {file}", flag)
    places = [key.rpartition(".")[0] for key, text in texts.items() if text and key.endswith(ends[0])]
    for column, flag in _COLUMNS.get(name, _COLUMNS["grpo"]).items() if places else ():
        keys = [theirs.text(f"{place}.{column}_key") or theirs.text(f"data.default.{column}_key") for place in places]
        keys = [key or ("messages" if column == "chat" else column) for key in keys]
        to.write_unless_default(flag, keys[0])
        if len({*keys}) > 1:
            to.changed.append(f"{column}_key = {', '.join(keys)}: all files share {flag}: rename the others' columns")
    tokenizer, template = (theirs.text(f"policy.tokenizer.{key}") for key in ("name", "chat_template"))
    template = template or theirs.given.get("policy.tokenizer.chat_template", "default")
    if name in _SAMPLED and template == "default":
        to.write("--prompt-chat")
    elif template not in ("default", "null"):
        to.changed.append("policy.tokenizer.chat_template: chats are written with the template of --hf-model")
    if tokenizer not in ("", theirs.text("policy.model_name")):
        to.changed.append(f"policy.tokenizer.name = {tokenizer}: the tokenizer is that of --hf-model")
    kinds = [text for key, text in texts.items() if key.endswith(".processor")]
    if theirs.is_on("policy.is_vlm") or any("vlm" in kind for kind in kinds):
        to.require("the data have images, which this package does not train on: choose a run with text alone")


def _require_reward(to: Translation, settings: Mapping[str, str]) -> None:
    """Require a reward, in place of NeMo-RL's environments; a teacher needs none."""
    names = dict.fromkeys(key.split(".")[1] for key in settings if key.startswith("env.") and key.count(".") > 1)
    gym = "; NeMo-Gym's environments are tasksets of --rollout-verifiers" if "nemo_gym" in names else ""
    if "--teacher" not in to.words:
        to.require(
            f"env = {', '.join(names)} gives NeMo-RL's rewards: write --reward FILE.py:NAME, or a ready-made one such "
            f"as math (docs/rewards.md){gym}",
            "--reward",
            "--rollout-verifiers",
        )


def _read_places(theirs: TheirSettings) -> tuple[int, int, bool, int, int]:
    """Read hosts, devices of each, whether engines share them, and the hosts and devices that engines have alone."""
    nodes, per_node = theirs.count("cluster.num_nodes") or 1, theirs.count("cluster.gpus_per_node") or 1
    place = f"{_ENGINES}.colocated"
    own_nodes, own = (theirs.count(f"{place}.resources.{key}") or 0 for key in ("num_nodes", "gpus_per_node"))
    return nodes, per_node, theirs.text(f"{place}.enabled").lower() != "false", own_nodes, own


def _place(to: Translation, nodes: int, per_node: int, is_shared: bool, own_nodes: int, own: int) -> None:
    to.nodes, to.ranks = nodes, per_node
    if is_shared and nodes == 1:
        to.write("--rollout-colocate")
        # They share accelerators, which this machine may not have.
        to.write("--platform", "cuda")
        of_engine = to.count("--rollout-tensor-parallel-size", 1) or 1
        to.write_unless_default("--rollout-num-engines", max(1, per_node // of_engine))
    elif is_shared or nodes == 1:
        place_devices(to, nodes, max(1, per_node - own) if nodes == 1 else per_node, is_shared, own)
    else:
        to.nodes = max(1, nodes - own_nodes)
        to.require(
            f"of {nodes} hosts {own_nodes} sample: start the engines there, and write --rollout-endpoint with their "
            "address",
            "--rollout-endpoint",
        )
