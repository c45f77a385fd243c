"""The settings of a run that trains: the division of an iteration, the places of files, and their checks."""

import dataclasses
import getpass
import hashlib
import importlib.util
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.algorithm.library import PREFERENCES
from megatron_rl.algorithm.settings import name_teachers
from megatron_rl.command_line import file_checks
from megatron_rl.command_line.algorithm_checks import name_deciding_rewards
from megatron_rl.command_line.checks import check_division, count_interleaved, fills_interleaving
from megatron_rl.config.hardware import CoreShares, count_cores, share_cores
from megatron_rl.config.settings import DraftSettings, Settings
from megatron_rl.errors import InputError, UsageError
from megatron_rl.shared.protocol.slots import Division, divide
from megatron_rl.shared.protocol.wire import LEAST_TEMPERATURE, Plan
from megatron_rl.sidecar.child import problems as check_sidecar
from megatron_rl.sidecar.settings import SidecarSettings, check_sharing, resolve_for_run


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The division of an iteration, and the greatest lengths of its parts."""

    division: Division
    longest_prompt: int
    """The most tokens of a prompt."""
    longest_response: int
    """The most tokens of a response."""
    is_shared: bool
    """Whether the responses of a group share one copy of their prompt."""
    multiple_of: int
    """The number of tokens whose multiple a micro-batch is padded to."""

    @property
    def plan(self) -> Plan:
        return self.division.plan

    @property
    def largest_micro_batch(self) -> int:
        """The most tokens of a micro-batch, with padding."""
        group_size, size = self.plan.group_size, self.plan.micro_batch_size
        prompts = self.division.groups_per_unit
        responses = group_size if size >= group_size else size
        copies = 1 if self.is_shared else responses
        num_tokens = prompts * (copies * self.longest_prompt + responses * self.longest_response)
        return num_tokens + -num_tokens % self.multiple_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """The settings that every rank of a run is built from."""

    sizes: Sizes
    folder: Path
    """The folder of all files of the run except its checkpoints."""
    sidecar: SidecarSettings | None
    """The settings of the sidecar that rank 0 starts; None if one is running already, or if the run does not sample."""
    cores: CoreShares
    """The shares of the CPU's cores for ranks and engines."""
    words: tuple[str, ...] = ()
    """The command line and the flags that follow from the device, for a process that counts the memory of a rank."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def num_updates(self) -> int:
        # A service has no last update.
        return (self.training.train_iters or 1) * self.sizes.plan.num_updates


def resolve_run(settings: DraftSettings) -> tuple[dict[str, Any] | None, list[str], Iterator[str]]:
    """Resolve the fields that `RunSettings` adds to settings, and find mistakes beyond the checks of every command.

    Those of the iterator concern the first rank's host alone.
    """
    replicas = None
    if settings.world_size is not None:
        # Too few ranks are a problem of their own.
        replicas = max(1, settings.world_size // settings.parallel_sizes.model)
    sizes, of_sizes = resolve_sizes(settings, replicas)
    problems, is_served = [], settings.run.stage == "serve"
    if settings.training.train_iters is None and not is_served:
        problems.append("--train-iters is missing: write the number of iterations")
    if settings.optimizer.lr is None and not is_served:
        problems.append("--lr is missing: training needs a learning rate")
    problems += of_sizes
    folder = None
    try:
        folder = find_run_folder(settings)
    except UsageError as error:
        problems += error.problems
    cores = _share_cores(settings)
    has_sidecar = settings.run.is_sampled and settings.service.endpoint is None
    sidecar = resolve_for_run(settings, folder, cores, _count_local_ranks(settings)) if has_sidecar else None
    of_host = _check_host(settings, sizes, sidecar)
    if sizes is None or folder is None:
        return None, problems, of_host
    return {"sizes": sizes, "folder": folder, "sidecar": sidecar, "cores": cores}, problems, of_host


def _check_host(settings: DraftSettings, sizes: Sizes | None, sidecar: SidecarSettings | None) -> Iterator[str]:
    """Yield each mistake in files, in folders and in the needs of the sidecar, which other hosts need not have."""
    yield from file_checks.find_problems(settings)
    if not settings.run.is_sampled:
        return
    if settings.run.stage == "serve" and importlib.util.find_spec("tinker") is None:
        yield "--stage serve needs the package tinker: pip install 'megatron_rl[tinker]'"
    longest = None if sizes is None else sizes.longest_prompt + sizes.longest_response
    yield from check_sidecar(settings, sidecar, longest)
    if sidecar is not None:
        yield from check_sharing(sidecar, _count_local_ranks(settings))


def _share_cores(settings: DraftSettings) -> CoreShares:
    """Divide this host's cores, if ranks or the engines of the run's own sidecar compute on them."""
    rollout, is_cpu = settings.rollout, settings.platform == "cpu"
    num_ranks = _count_local_ranks(settings) if is_cpu else 0
    is_started = settings.run.is_sampled and settings.service.endpoint is None
    has_engines = is_cpu and is_started and rollout.engine == "vllm"
    num_workers = rollout.num_engines * rollout.tensor_parallel_size if has_engines else 0
    return share_cores(count_cores(), num_ranks, num_workers, rollout.num_threads if has_engines else None)


def _count_local_ranks(settings: DraftSettings) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", settings.world_size or 1))


def compute_sizes(settings: DraftSettings, num_replicas: int) -> Sizes:
    """Compute the sizes of a run on `num_replicas` replicas; raise a UsageError with every mistake."""
    sizes, problems = resolve_sizes(settings, num_replicas)
    if sizes is None or problems:
        raise UsageError(*problems)
    return sizes


def resolve_sizes(settings: DraftSettings, num_replicas: int | None) -> tuple[Sizes | None, list[str]]:
    """Resolve the sizes of a run, and find every mistake in them.

    If the number of replicas is unknown, sizes are those of one, and checks that depend on the number are omitted.
    """
    if settings.run.stage != "grpo":
        return _resolve_demonstrations(settings, num_replicas)
    training = settings.training
    problems = [*_check_model(settings), *_check_sampling(settings), *_check_lengths(settings)]
    division, of_division = _divide(settings, num_replicas or 1)
    problems += of_division
    if training.train_iters is not None and division is not None:
        problems += _check_updates(settings, training.train_iters * division.plan.num_updates)
    problems += _check_reference(settings)
    if division is not None:
        problems += _check_offload(settings, division)
        if num_replicas is not None:
            problems += _check_interleaving(settings, division)
    lengths = _resolve_lengths(settings)
    if division is None or lengths is None:
        return None, problems
    sizes = Sizes(division, *lengths, settings.attention.is_shared, find_pack_multiple(settings))
    parts = f" ({sizes.longest_prompt} of a prompt, {sizes.longest_response} of each response)"
    problems += _check_most_tokens(settings, sizes, parts, "--rollout-max-tokens or --max-prompt-tokens")
    return sizes, problems


def _check_most_tokens(settings: DraftSettings, sizes: Sizes, parts: str, flags: str) -> Iterator[str]:
    most = settings.loop.max_tokens_per_microbatch
    if most is not None and sizes.largest_micro_batch > most:
        yield (
            f"--max-tokens-per-microbatch {most}: a micro-batch of --micro-batch-size "
            f"{settings.training.micro_batch_size} can have {sizes.largest_micro_batch} tokens{parts}: lower it, "
            f"{flags}"
        )


def _resolve_demonstrations(settings: DraftSettings, num_replicas: int | None) -> tuple[Sizes | None, list[str]]:
    """Resolve sizes for stages that read responses: a row counts as a group of one response, prompt included.

    A service takes rows as they come; its sizes are those of a micro-batch in each replica.
    """
    training = settings.training
    if settings.run.stage == "serve":
        whole = training.micro_batch_size * (num_replicas or 1)
        training = dataclasses.replace(training, global_batch_size=whole, train_iters=None)
        settings = dataclasses.replace(settings, training=training)
    problems = [*_check_model(settings)]
    items = "pairs" if settings.run.stage == "dpo" else "demonstrations"
    if settings.run.stage == "dpo":
        problems += _check_ref_model(settings)
    if training.train_iters is not None:
        problems += _check_updates(settings, training.train_iters)
    if training.global_batch_size is None:
        problems.append(f"--global-batch-size is missing: write the {items} of an update")
    if training.seq_length is None:
        problems.append("--seq-length is missing: write the most tokens of a sequence")
    if training.global_batch_size is None or training.seq_length is None:
        return None, problems
    uneven = [*check_division(settings, num_replicas or 1)]
    if uneven:
        return None, problems + uneven
    plan = Plan(
        num_prompts=training.global_batch_size,
        group_size=1,
        num_replicas=num_replicas or 1,
        micro_batch_size=training.micro_batch_size,
        num_updates=1,
        order="prompt",
    )
    is_paired = settings.run.stage == "dpo"
    longest = training.seq_length * (PREFERENCES[settings.preference.loss].num_responses if is_paired else 1)
    sizes = Sizes(divide(plan), 0, longest, True, find_pack_multiple(settings))
    return sizes, [*problems, *_check_most_tokens(settings, sizes, "", "or --seq-length")]


def _check_model(settings: DraftSettings) -> Iterator[str]:
    if settings.model.hf_model is None:
        yield "--hf-model is missing: a run starts from a Hugging Face folder, and its data need the folder's tokens"


def _check_sampling(settings: DraftSettings) -> Iterator[str]:
    """Yield each mistake that the sidecar would refuse only after its engines have started."""
    temperature, evaluation = settings.sampling.temperature, settings.evaluation
    if not LEAST_TEMPERATURE <= temperature < math.inf:
        yield (
            f"--rollout-temperature {temperature:g} must be finite and at least {LEAST_TEMPERATURE}, because training "
            f"needs sampled responses: write {LEAST_TEMPERATURE} or more"
        )
    if not 0 <= evaluation.temperature < math.inf or 0 < evaluation.temperature < LEAST_TEMPERATURE:
        yield (
            f"--eval-temperature {evaluation.temperature:g} must be 0, or finite and at least {LEAST_TEMPERATURE}: "
            f"write 0 for the likeliest tokens, or {LEAST_TEMPERATURE} or more"
        )
    if evaluation.temperature == 0 and evaluation.num_samples > 1:
        yield (
            f"--eval-num-samples {evaluation.num_samples} at --eval-temperature 0 gives the same response each time: "
            "write 1, or a temperature"
        )


def _check_updates(settings: DraftSettings, num_updates: int) -> Iterator[str]:
    """Check the schedule of the learning rate against the number of updates."""
    schedule = settings.schedule
    if schedule.lr_decay_iters is None and schedule.lr_warmup_iters >= num_updates:
        yield (
            f"--lr-warmup-iters {schedule.lr_warmup_iters} must be below the {num_updates} updates of the decay: write "
            "fewer, or --lr-decay-iters"
        )
    decay = num_updates if schedule.lr_decay_iters is None else schedule.lr_decay_iters
    last = schedule.lr_wsd_decay_iters
    if schedule.lr_decay_style == "WSD" and last is not None and last > decay:
        yield (
            f"--lr-wsd-decay-iters {last} must be at most the {decay} updates of the whole decay: write fewer, or "
            "--lr-decay-iters"
        )


def _check_reference(settings: DraftSettings) -> Iterator[str]:
    """Check the flags of a reference, which only some runs have."""
    algorithm = settings.algorithm
    for flag, value in (("--grpo-ref-interval", algorithm.ref_interval), ("--grpo-ref-model", algorithm.ref_model)):
        if value is not None and not algorithm.kl_beta:
            yield f"{flag} {value} needs a reference, which --grpo-kl-beta adds: write its weight, or drop {flag}"
    yield from _check_ref_model(settings)


def _check_ref_model(settings: DraftSettings) -> Iterator[str]:
    folder = settings.algorithm.ref_model
    if folder is not None and not folder.is_dir():
        yield f"--grpo-ref-model {folder} must be a folder: write one in Hugging Face's format"


def _check_offload(settings: DraftSettings, division: Division) -> Iterator[str]:
    has_old = division.plan.num_updates > 1 and settings.loop.tri_model == "fused"
    algorithm = settings.algorithm
    has_other = algorithm.kl_beta or name_teachers(algorithm.teacher) or algorithm.roles
    if settings.loop.frozen_offload and not has_other and not has_old:
        yield (
            "--frozen-offload has no model to keep in host memory: a reference needs --grpo-kl-beta, a teacher "
            "--teacher, an old policy several updates an iteration and --tri-model fused; write one of them, or drop "
            "the flag"
        )


def _divide(settings: DraftSettings, num_replicas: int) -> tuple[Division | None, list[str]]:
    """Divide an iteration; return the division, or None with the reasons."""
    algorithm, training = settings.algorithm, settings.training
    group_size, of_update = algorithm.group_size, training.global_batch_size
    prompts = algorithm.prompts_per_step
    if prompts is None and of_update is None:
        return None, [
            "--grpo-prompts-per-step is missing: write the prompts of an iteration, or --global-batch-size, the "
            "responses of an update"
        ]
    if prompts is None:
        assert of_update is not None
        if of_update % group_size:
            return None, [
                f"--global-batch-size {of_update} must be a multiple of --grpo-group-size {group_size}, because an "
                "update takes whole groups: write one that is"
            ]
        prompts = of_update // group_size
    responses = prompts * group_size
    if of_update is None:
        of_update = responses
    if responses % of_update or of_update % group_size:
        return None, [
            f"--global-batch-size {of_update} does not divide the {responses} responses of an iteration "
            f"(--grpo-prompts-per-step {prompts} times --grpo-group-size {group_size}) into updates of whole groups: "
            f"write {responses} for one update, or a multiple of {group_size} that divides it"
        ]
    plan = Plan(
        num_prompts=prompts,
        group_size=group_size,
        num_replicas=num_replicas,
        micro_batch_size=training.micro_batch_size,
        num_updates=responses // of_update,
        order=settings.loop.consume_order,
        num_spare=_count_spare(settings, prompts),
        tail=settings.sampling.tail,
        num_tail=_count_tail(settings, prompts),
        deciding_rewards=name_deciding_rewards(settings),
        least_reward=algorithm.reward_min if algorithm.reward_min > -math.inf else None,
        largest_reward=algorithm.reward_max if algorithm.reward_max < math.inf else None,
    )
    try:
        return divide(plan), []
    except InputError as error:
        return None, [str(error)]


def _count_spare(settings: DraftSettings, num_prompts: int) -> int:
    """Count the prompts that an iteration may take in place of those without a signal."""
    algorithm = settings.algorithm
    if not algorithm.filter_groups:
        return 0
    return 2 * num_prompts if algorithm.spare_prompts is None else algorithm.spare_prompts


def _count_tail(settings: DraftSettings, num_prompts: int) -> int:
    """Count the groups in the tail of an iteration."""
    sampling = settings.sampling
    if sampling.tail == "stop":
        return 0
    return max(1, num_prompts // 8) if sampling.tail_groups is None else sampling.tail_groups


def _check_interleaving(settings: DraftSettings, division: Division) -> Iterator[str]:
    """Check the number of micro-batches, which is known here even if no flag sets it."""
    count = division.slots_per_update
    sizes = settings.parallel_sizes
    if sizes.virtual_pipeline is not None and not fills_interleaving(settings, count):
        yield (
            f"{count} micro-batches an update do not fill the interleaved schedule of {sizes.pipeline} stages: change "
            f"--grpo-prompts-per-step or --micro-batch-size so that their number is a multiple of "
            f"{count_interleaved(settings)}, or drop the virtual stages"
        )


def _check_lengths(settings: DraftSettings) -> Iterator[str]:
    whole, prompt, response = _read_lengths(settings)
    if whole is None:
        yield "--seq-length is missing: write the most tokens that a prompt and a response have together"
    if prompt is None and response is None:
        yield "--rollout-max-tokens is missing: write the most tokens of a response"
    if whole is None:
        return
    wrong = [
        f"{flag} {value} must be above 0 and below --seq-length {whole}: write one that is"
        for flag, value in (("--max-prompt-tokens", prompt), ("--rollout-max-tokens", response))
        if value is not None and not 0 < value < whole
    ]
    yield from wrong
    if not wrong and prompt is not None and response is not None and prompt + response > whole:
        yield (
            f"--max-prompt-tokens {prompt} and --rollout-max-tokens {response} together are above --seq-length "
            f"{whole}: make one smaller, or write --seq-length {prompt + response}"
        )


def _resolve_lengths(settings: DraftSettings) -> tuple[int, int] | None:
    """Return the most tokens of a prompt and of a response, which together are at most --seq-length."""
    whole, prompt, response = _read_lengths(settings)
    if whole is None or (prompt is None and response is None) or any(_check_lengths(settings)):
        return None
    if response is None:
        assert prompt is not None
        response = whole - prompt
    return (prompt if prompt is not None else whole - response), response


def _read_lengths(settings: DraftSettings) -> tuple[int | None, int | None, int | None]:
    return settings.training.seq_length, settings.data.max_prompt_tokens, settings.sampling.max_tokens


def find_run_folder(settings: DraftSettings) -> Path:
    """Find the folder of all files of a run except its checkpoints; its name is the run's name."""
    save = settings.checkpoint.save
    if settings.rollout.folder is not None:
        return settings.rollout.folder
    if save is None:
        raise UsageError("--rollout-folder is missing: write it, or --save, and the run's folder is SAVE/rollout/NAME")
    return save / "rollout" / save.resolve().name


def find_shared_folder(settings: DraftSettings) -> Path:
    """Find the folder of this run's published weights; runs of one name in different places have different folders."""
    of_user = settings.publish.folder or Path("/dev/shm") / f"megatron_rl-{getpass.getuser()}"
    run = find_run_folder(settings).resolve()
    return of_user / f"{run.name}-{hashlib.sha256(os.fsencode(run)).hexdigest()[:12]}"


def find_pack_multiple(settings: DraftSettings) -> int:
    """Return the number whose multiple a pack's length is padded to, so that all ranks get the same number of rows."""
    config = settings.transformer
    return (config.tensor_model_parallel_size if config.sequence_parallel else 1) * config.context_parallel_size
