"""The data of a run, and checks of weights and checkpoints. Only the tokenizing comes after a sidecar's start."""

import dataclasses
import importlib
import math
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.algorithm.declaration import find_role
from megatron_rl.algorithm.library import PREFERENCES
from megatron_rl.algorithm.plug_ins import compare_plug_ins, find_roles
from megatron_rl.algorithm.settings import name_teachers
from megatron_rl.command_line.describe import describe_objective, describe_own_files
from megatron_rl.command_line.run import RunSettings
from megatron_rl.config.settings import Settings
from megatron_rl.environments.types import Description
from megatron_rl.errors import InputError
from megatron_rl.observe import metrics
from megatron_rl.observe.startup import Startup, describe_prompts
from megatron_rl.shared.device_memory import has_reference, make_look_up
from megatron_rl.shared.protocol.wire import decode_tokens
from megatron_rl.shared.records.append_file import read_lines
from megatron_rl.shared.records.audit_events import list_changes
from megatron_rl.shared.weights.files import Checkpoint
from megatron_rl.shared.weights.mapping import Mapping
from megatron_rl.sidecar import load_part
from megatron_rl.sidecar.hosts import find_secrets
from megatron_rl.trainer.data.prompts import PromptRows, PromptSource, read_prompts, tokenize_prompts
from megatron_rl.trainer.loop.saver import KeptState, find_missing_hf, read_kept_state
from megatron_rl.trainer.mcore.checkpoint import folders, serialization
from megatron_rl.trainer.mcore.checkpoint.checkpointer import EXTRA, check_loaded_schedule

if TYPE_CHECKING:
    from megatron_rl.trainer.data.demonstrations import DemonstrationSource

# The modules that only runs with demonstrations import, and those with a teacher.
_TEACHER = "megatron_rl.trainer.data.teacher"
_DEMONSTRATIONS = "megatron_rl.trainer.data.demonstrations"


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The data of a run: prompts or demonstrations on rank 0, as --stage says; nothing on the other ranks."""

    prompts: PromptSource | None = None
    demonstrations: "DemonstrationSource | None" = None
    notes: tuple[str, ...] = ()
    """Lines for people about the settings and the data."""
    is_finished: bool = False
    """Whether the checkpoint leaves nothing to do; a note says so."""

    @property
    def data(self) -> "PromptSource | DemonstrationSource | None":
        """The source that the run reads from; on rank 0."""
        return self.demonstrations if self.prompts is None else self.prompts


@dataclasses.dataclass(frozen=True)
class CheckedInputs:
    """The part of a run's inputs that needs no tokenizer: with it a sidecar can start."""

    rows: PromptRows | None
    """The rows of the prompts; None for a stage without prompts."""
    notes: tuple[str, ...]
    """Lines for people about the loaded checkpoint."""
    is_finished: bool
    """Whether the checkpoint leaves nothing to do; a note says so."""
    offered: Description | None = None
    """The environment as its class describes it; None for a run without one."""


def check_inputs(settings: RunSettings) -> CheckedInputs:
    """Read the prompts; raise an error if weights, checkpoints, folder or environment do not fit the settings."""
    rows = read_prompts(settings.data) if settings.run.stage == "grpo" else None
    if rows is not None and settings.algorithm.teacher is not None:
        teachers = [name for name in settings.frozen if find_role(name) == "teacher"]
        teachers += name_teachers(settings.algorithm.teacher, are_served=True)
        importlib.import_module(_TEACHER).check_choices(teachers, rows.trained)
    _check_weights(settings)
    if settings.run.stage == "serve":
        return CheckedInputs(None, (), is_finished=False)
    check_save_folder(settings)
    check_loaded_stage(settings)
    check_loaded_schedule(settings, settings.num_updates)
    _check_continuation(settings)
    notes = _compare_loaded(settings)
    notes += _note_reference(settings)
    finished = describe_finished(settings)
    if finished is not None:
        notes.append(finished)
    offered = _describe_environment(settings)
    return CheckedInputs(rows, tuple(notes), is_finished=finished is not None, offered=offered)


def load_inputs(settings: RunSettings, checked: CheckedInputs, startup: Startup) -> Inputs:
    """Tokenize the data; clients of a service send theirs."""
    if settings.run.stage == "serve":
        return Inputs(notes=settings.notes)
    name = {"grpo": "prompts", "sft": "demonstrations", "dpo": "pairs"}[settings.run.stage]
    startup.say(f"{name}: they are read and tokenized")
    model, sizes = settings.model.hf_model, settings.sizes
    assert model is not None
    of_run = {"seed": settings.training.seed, "vocab_size": settings.architecture.vocab_size}
    demonstrations = prompts = None
    if checked.rows is None:
        load = importlib.import_module(_DEMONSTRATIONS).load_demonstrations
        longest, has_strangers = settings.training.seq_length, PREFERENCES[settings.preference.loss].reads_strangers
        stage = settings.run.stage
        data = demonstrations = load(settings.data, model, stage, has_strangers, longest=longest, **of_run)
    else:
        data = prompts = tokenize_prompts(
            checked.rows,
            settings.data,
            model,
            longest=sizes.longest_prompt,
            has_environments=settings.environment.has_turns,
            tools=() if checked.offered is None else checked.offered.tools,
            **of_run,
        )
    startup.say(describe_prompts(data.num_rows, data.num_held_out, data.num_read, name))
    if prompts is not None:
        _check_tokens(settings, prompts)
    notes = (*settings.notes, *data.notes, *checked.notes)
    return Inputs(prompts, demonstrations, notes, checked.is_finished)


def _describe_environment(settings: RunSettings) -> Description | None:
    """Describe the environment; raise a UsageError if this run's own sidecar would refuse it."""
    if settings.environment.source is None:
        return None
    secrets = find_secrets(settings.rollout.hosts)
    return load_part("environments").describe_environment(
        settings.environment, settings.reward, settings.folder, secrets, settings.sidecar
    )


def _check_tokens(settings: Settings, prompts: PromptSource) -> None:
    """Raise an InputError unless models of frozen roles and the critic have the policy's tokens."""
    some, roles = (
        [decode_tokens(prompt.tokens).tolist() for prompt in prompts.list_kinds()],
        find_roles(settings.algorithm),
    )
    flags = {id(one): roles[find_role(name)].flag for name, one in settings.frozen.items()}
    for other in _list_others(settings):
        flag = flags.get(id(other), "--critic")
        importlib.import_module(_TEACHER).check_tokens(flag, other.model.hf_model, settings.model.hf_model, some)
    for folder in name_teachers(settings.algorithm.teacher, are_served=True).values():
        importlib.import_module(_TEACHER).check_tokens("--teacher", folder, settings.model.hf_model, some)


def _check_weights(settings: Settings) -> None:
    """Raise an InputError unless the folders hold the architecture's tensors."""
    reference = settings.algorithm.ref_model if has_reference(make_look_up(settings)) else None
    for folder in (settings.model.hf_model, reference):
        if folder is not None:
            with Checkpoint(folder) as checkpoint:
                checkpoint.check(Mapping(settings.architecture))
    for other in _list_others(settings):
        assert other.model.hf_model is not None
        with Checkpoint(other.model.hf_model) as checkpoint:
            checkpoint.check(Mapping(other.architecture))


def _list_others(settings: Settings) -> list[Settings]:
    """List the settings of frozen roles and critic."""
    return [*settings.frozen.values(), *([] if settings.critic is None else [settings.critic])]


def check_save_folder(settings: Settings) -> None:
    """Raise an InputError if --save holds checkpoints that this run may not replace."""
    config = settings.checkpoint
    folders.check_own(config.save, config.load)
    if (loaded := folders.find_named(config.load, config.ckpt_step)) is not None:
        version, source = loaded
        folders.find_resumed(config.save, 0 if config.finetune else version, source)


def _find_loaded(settings: Settings) -> tuple[int, Path] | None:
    """Return the version and the folder of the checkpoint that the run resumes; None if it begins at version 0."""
    config = settings.checkpoint
    return None if config.finetune else folders.find_named(config.load, config.ckpt_step)


def _read_loaded(settings: Settings) -> tuple[KeptState, Path] | None:
    """Return what the loaded checkpoint keeps of its run, and its folder.

    None if the run begins at version 0, or if loading will refuse the checkpoint as another program's.
    """
    loaded = _find_loaded(settings)
    extra = None if loaded is None else serialization.read_common(loaded[1]).get(EXTRA)
    return None if loaded is None or extra is None else (read_kept_state(extra, loaded[1]), loaded[1])


def check_loaded_stage(settings: Settings) -> None:
    """Raise an InputError if another stage saved the checkpoint that --load names."""
    if (loaded := _read_loaded(settings)) is None:
        return
    kept, source = loaded
    if kept.stage != settings.run.stage:
        raise InputError(
            f"{source} was saved by --stage {kept.stage}, and this run is --stage {settings.run.stage}: write "
            f"--finetune to begin with its weights, or --stage {kept.stage} to continue"
        )


def _compare_loaded(settings: Settings) -> list[str]:
    """Return a note for each plug-in that only one of checkpoint and run has, and one for a changed objective.

    Raise an InputError if the file of a plug-in has changed since.
    """
    if (loaded := _read_loaded(settings)) is None:
        return []
    kept, source = loaded
    notes = compare_plug_ins(kept.plug_ins, describe_own_files(settings), source)
    if changes := list_changes(kept.objective, describe_objective(settings)):
        notes.append(f"{source} was trained with another objective; from here on: {', '.join(changes)}")
    return notes


def _note_reference(settings: RunSettings) -> list[str]:
    """Note that pairs are compared with other weights than training begins with."""
    begun = settings.checkpoint.load if settings.checkpoint.finetune else settings.lora.load
    if (
        settings.run.stage != "dpo"
        or begun is None
        or settings.algorithm.ref_model
        or not has_reference(make_look_up(settings))
    ):
        return []
    return [
        f"training begins with the weights of {begun}, and the reference is --hf-model {settings.model.hf_model}: to "
        "compare with the first weights, write the Hugging Face folder that --save-hf made of them as --hf-model"
    ]


def _check_continuation(settings: RunSettings) -> None:
    """Raise an InputError if the folder's metrics end before the checkpoint: another run's, or a part of this one's."""
    path = settings.folder / metrics.FILE_NAME
    loaded = _find_loaded(settings) if path.exists() else None
    if loaded is None:
        return
    version, source = loaded
    records = read_lines(path)
    last = records[-1]["version"] if records else math.inf
    if last < version - 1:
        raise InputError(
            f"{settings.folder} holds a run up to version {last}, and {source} continues from version {version}: "
            "name the --rollout-folder of the run that saved it, or a new one"
        )


def describe_finished(settings: RunSettings) -> str | None:
    """Return what to tell the user if the checkpoint leaves nothing to do; None if the run must start.

    Nothing is left to do if the checkpoint holds --train-iters iterations, and the run would make neither the Hugging
    Face folder of its last iteration nor the evaluation after it.
    """
    num_iterations, loaded = settings.training.train_iters, _find_loaded(settings)
    assert num_iterations is not None
    if loaded is None:
        return None
    version, source = loaded
    kept = _read_loaded(settings)
    # Loading refuses the checkpoint of another run, and says why.
    if version < num_iterations or kept is None or kept[0].run != settings.name:
        return None
    if find_missing_hf(settings, version) is not None or _lacks_evaluation(settings, version):
        return None
    return (
        f"{source} already holds iteration {version} of --train-iters {num_iterations}: nothing is left to do, and "
        "nothing was started. Write a larger --train-iters to train on"
    )


def _lacks_evaluation(settings: RunSettings, version: int) -> bool:
    if not settings.is_evaluated:
        return False
    path = settings.folder / metrics.FILE_NAME
    records = read_lines(path) if path.exists() else []
    return not any(record["version"] == version and "evaluation" in record for record in records)
