"""How an iteration is divided: from flags to the plan that trainer and sidecar share; what cannot be is refused."""

import dataclasses
import getpass
import hashlib
import math
import os
from pathlib import Path

from megatron_rl.config import Settings
from megatron_rl.errors import InputError, UsageError
from megatron_rl.rollout.slots import Division, divide
from megatron_rl.rollout.wire import LEAST_TEMPERATURE, Plan
from megatron_rl.training.batches import pack_multiple


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What follows from the flags on batches."""

    division: Division
    longest_prompt: int
    """The most tokens of a prompt."""
    longest_response: int
    """The most tokens of a response."""
    is_shared: bool
    """Whether the responses of a group share one copy of their prompt."""
    multiple_of: int
    """What the tokens of a micro-batch are padded to a multiple of."""

    @property
    def plan(self) -> Plan:
        return self.division.plan

    @property
    def largest_micro_batch(self) -> int:
        """The most tokens that a micro-batch can have, padding counted in."""
        group_size, size = self.plan.group_size, self.plan.micro_batch_size
        prompts = self.division.groups_per_unit
        responses = group_size if size >= group_size else size
        copies = 1 if self.is_shared else responses
        num_tokens = prompts * (copies * self.longest_prompt + responses * self.longest_response)
        return num_tokens + -num_tokens % self.multiple_of


def sizes_of(settings: Settings, num_replicas: int) -> Sizes:
    """A UsageError for the first thing that cannot be."""
    algorithm, training, loop = settings.algorithm, settings.training, settings.loop
    group_size = algorithm.group_size
    if group_size < 2:
        raise UsageError(
            f"--grpo-group-size {group_size}: a response is compared with the others of its group: write 2 or more"
        )
    if training.train_iters is None:
        raise UsageError("--train-iters is missing: write the number of iterations")
    if settings.model.hf_model is None:
        raise UsageError("--hf-model is missing: engines start from a Hugging Face folder, and prompts need its tokens")
    _check_sampling(settings)
    division = _divide(settings, num_replicas)
    _check_schedule(settings, training.train_iters * division.plan.num_updates)
    _check_frozen(settings, division)
    _check_interleaving(settings, division)
    longest_prompt, longest_response = _lengths(settings)
    sizes = Sizes(division, longest_prompt, longest_response, settings.attention.is_shared, pack_multiple(settings))
    most = loop.max_tokens_per_microbatch
    if most is not None and sizes.largest_micro_batch > most:
        raise UsageError(
            f"--max-tokens-per-microbatch {most}: a micro-batch of --micro-batch-size {training.micro_batch_size} can "
            f"have {sizes.largest_micro_batch} tokens ({longest_prompt} of a prompt, {longest_response} of each "
            f"response): make it smaller, or --rollout-max-tokens, or --max-prompt-tokens"
        )
    return sizes


def _check_sampling(settings: Settings) -> None:
    """What the sidecar would refuse later, when engines run."""
    temperature, evaluation = settings.sampling.temperature, settings.evaluation
    if not LEAST_TEMPERATURE <= temperature < math.inf:
        raise UsageError(
            f"--rollout-temperature {temperature:g}: what is trained on is sampled; write {LEAST_TEMPERATURE} or more"
        )
    if not 0 <= evaluation.temperature < math.inf or 0 < evaluation.temperature < LEAST_TEMPERATURE:
        raise UsageError(
            f"--eval-temperature {evaluation.temperature:g}: write 0, which is greedy, or {LEAST_TEMPERATURE} or more"
        )
    for flag, value in (
        ("--eval-interval", evaluation.interval),
        ("--eval-num-samples", evaluation.num_samples),
        ("--eval-num-prompts", evaluation.num_prompts),
    ):
        if value is not None and value < 1:
            raise UsageError(f"{flag} {value} is below 1: write 1 or more")
    if evaluation.temperature == 0 and evaluation.num_samples > 1:
        raise UsageError(
            f"--eval-num-samples {evaluation.num_samples} at --eval-temperature 0 are all the same response: write 1, "
            "or a temperature"
        )


def _check_schedule(settings: Settings, num_updates: int) -> None:
    """What of the learning rate depends on the updates of the run, or is not needed but by one."""
    schedule = settings.schedule
    if settings.optimizer.get("lr") is None:
        raise UsageError("--lr is missing: training needs a learning rate")
    decay = num_updates if schedule.lr_decay_iters is None else schedule.lr_decay_iters
    if schedule.lr_warmup_iters >= decay:
        raise UsageError(
            f"--lr-warmup-iters {schedule.lr_warmup_iters} is not below the {decay} updates of the decay: write fewer, "
            "or --lr-decay-iters"
        )
    last = schedule.lr_wsd_decay_iters
    if schedule.lr_decay_style == "WSD" and last is not None and last > decay:
        raise UsageError(
            f"--lr-wsd-decay-iters {last} is above the {decay} updates of the whole decay: write fewer, or "
            "--lr-decay-iters"
        )


def _check_frozen(settings: Settings, division: Division) -> None:
    """Flags of models that there are only in some runs."""
    algorithm, loop = settings.algorithm, settings.loop
    interval = algorithm.ref_interval
    if interval is not None and interval < 1:
        raise UsageError(f"--grpo-ref-interval {interval} is below 1: write 1 or more, or drop it")
    if interval is not None and not algorithm.kl_beta:
        raise UsageError(
            f"--grpo-ref-interval {interval} moves a reference, and without --grpo-kl-beta there is none: write its "
            "weight, or drop --grpo-ref-interval"
        )
    if algorithm.ref_model is not None and not algorithm.kl_beta:
        raise UsageError(
            f"--grpo-ref-model {algorithm.ref_model} is of a reference, and without --grpo-kl-beta there is none: "
            "write its weight, or drop --grpo-ref-model"
        )
    if algorithm.ref_model is not None and not algorithm.ref_model.is_dir():
        raise UsageError(f"--grpo-ref-model {algorithm.ref_model} is no folder: write one in Hugging Face's form")
    has_old = division.plan.num_updates > 1 and loop.tri_model == "fused"
    if loop.frozen_offload and not algorithm.kl_beta and not has_old:
        raise UsageError(
            "--frozen-offload has no model to keep in the host's memory: the reference needs --grpo-kl-beta, the old "
            "policy several updates an iteration and --tri-model fused; write one of them, or drop it"
        )


def _divide(settings: Settings, num_replicas: int) -> Division:
    algorithm, training = settings.algorithm, settings.training
    group_size, of_update = algorithm.group_size, training.global_batch_size
    prompts = algorithm.prompts_per_step
    if prompts is None:
        if of_update is None:
            raise UsageError(
                "--grpo-prompts-per-step is missing: write the prompts of an iteration, or --global-batch-size, the "
                "responses of an update"
            )
        if of_update % group_size:
            raise UsageError(
                f"--global-batch-size {of_update} is not a multiple of --grpo-group-size {group_size}: it counts "
                "responses, and an update takes whole groups"
            )
        prompts = of_update // group_size
    responses = prompts * group_size
    if of_update is None:
        of_update = responses
    if of_update < 1 or responses % of_update or of_update % group_size:
        raise UsageError(
            f"--global-batch-size {of_update} does not divide the {responses} responses of an iteration "
            f"(--grpo-prompts-per-step {prompts} times --grpo-group-size {group_size}) into updates of whole groups: "
            f"write {responses} for one update, or a multiple of {group_size} that divides it"
        )
    plan = Plan(
        num_prompts=prompts,
        group_size=group_size,
        num_replicas=num_replicas,
        micro_batch_size=training.micro_batch_size,
        num_updates=responses // of_update,
        order=settings.loop.consume_order,
    )
    try:
        return divide(plan)
    except InputError as error:
        raise UsageError(str(error)) from None


def _check_interleaving(settings: Settings, division: Division) -> None:
    """The micro-batches of an update are known here even where no flag names them."""
    fields = settings.transformer
    if not fields.get("virtual_pipeline_model_parallel_size"):
        return
    stages = fields["pipeline_model_parallel_size"]
    group = fields.get("microbatch_group_size_per_vp_stage") or stages
    count = division.slots_per_update
    if count < stages or 0 < count % group < stages:
        raise UsageError(
            f"{count} micro-batches an update do not fill the interleaved schedule of {stages} stages: change "
            f"--grpo-prompts-per-step or --micro-batch-size so that there is a multiple of {group}, or drop the "
            "virtual stages"
        )


def _lengths(settings: Settings) -> tuple[int, int]:
    """The most tokens of a prompt and of a response; together they are at most --seq-length."""
    whole, prompt, response = (
        settings.training.seq_length,
        settings.data.max_prompt_tokens,
        settings.sampling.max_tokens,
    )
    if whole is None:
        raise UsageError("--seq-length is missing: write the most tokens that a prompt and a response have together")
    for flag, value in (("--max-prompt-tokens", prompt), ("--rollout-max-tokens", response)):
        if value is not None and not 0 < value < whole:
            raise UsageError(f"{flag} {value} is not between 0 and --seq-length {whole}: write one that is")
    if prompt is not None and response is not None and prompt + response > whole:
        raise UsageError(
            f"--max-prompt-tokens {prompt} and --rollout-max-tokens {response} together are above --seq-length "
            f"{whole}: make one smaller, or write --seq-length {prompt + response}"
        )
    if response is None:
        if prompt is None:
            raise UsageError("--rollout-max-tokens is missing: write the most tokens of a response")
        response = whole - prompt
    return (prompt if prompt is not None else whole - response), response


def run_folder(settings: Settings) -> Path:
    """Where everything of a run lies that is no checkpoint; its name is the run's."""
    save = settings.checkpoint.save
    if settings.rollout.folder is not None:
        return settings.rollout.folder
    if save is None:
        raise UsageError("--rollout-folder is missing: write it, or --save, and the run's folder is SAVE/rollout/NAME")
    return save / "rollout" / save.resolve().name


def check_folders(settings: Settings) -> None:
    """A UsageError for the first folder that this host cannot make; a dashboard's is no reason not to run."""
    checkpoint = settings.checkpoint
    for flag, folder in (
        ("--rollout-folder", settings.rollout.folder),
        ("--publish-folder", settings.publish.folder),
        ("--save", checkpoint.save),
        ("--save-hf", checkpoint.save_hf),
    ):
        if folder is not None and (problem := _problem_of_folder(folder)) is not None:
            raise UsageError(f"{flag} {folder} cannot be made or written: {problem}: write another folder")


def _problem_of_folder(folder: Path) -> str | None:
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:
        return error.strerror
    if not there.is_dir():
        return f"{there} is no folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} is not open to this user"


def shared_folder(settings: Settings) -> Path:
    """Where this run's weights are handed over: runs of one name in two places do not share it."""
    of_user = settings.publish.folder or Path("/dev/shm") / f"megatron_rl-{getpass.getuser()}"
    run = run_folder(settings).resolve()
    return of_user / f"{run.name}-{hashlib.sha256(os.fsencode(run)).hexdigest()[:12]}"
