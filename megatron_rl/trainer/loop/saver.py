"""Checkpoints of a run: when they are due, the values next to model and optimizer, the checks of a resumed run."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.algorithm.declaration import CRITIC
from megatron_rl.algorithm.roles.reference import REFERENCE
from megatron_rl.command_line.describe import describe_objective, describe_own_files
from megatron_rl.config.settings import Settings
from megatron_rl.errors import ForeignVersion, InputError
from megatron_rl.shared.device_memory import PACK_FLAG, RECOMPUTE_NORMS
from megatron_rl.trainer.mcore.checkpoint.checkpointer import Checkpointer
from megatron_rl.trainer.mcore.checkpoint.folders import iteration_folder, latest_iteration, withdraw
from megatron_rl.trainer.mcore.session import Session
from megatron_rl.trainer.mcore.step.policy import FrozenModel, Policy, Trainable

if TYPE_CHECKING:
    from megatron_rl.trainer.data.demonstrations import DemonstrationSource
    from megatron_rl.trainer.data.prompts import PromptSource


@dataclasses.dataclass(frozen=True)
class KeptState:
    """The values that a checkpoint keeps of its run, next to model and optimizer."""

    run: str
    stage: str
    prompts: Mapping[str, Any]
    """The place in the data."""
    stops: Sequence[int]
    """Tokens that end a response, in addition to those that the model's files list."""
    reference: str | None
    """The fingerprint of the reference's first weights; None without a reference."""
    audit_head: str
    plug_ins: Mapping[str, str]
    objective: Mapping[str, str]
    baseline: float | None
    micro_batch_size: int
    recomputes_norms: bool
    attention: str
    attention_blocks: str


@dataclasses.dataclass(frozen=True)
class RunState:
    """The values that an iteration leaves to the next one, next to weights and the place in the data."""

    audit_head: str = ""
    """Head of the sidecar's audit log when the iteration was completed; on rank 0."""
    baseline: float | None = None
    """Mean reward of the iteration, if --grpo-advantage takes it off in the next one."""


@dataclasses.dataclass(frozen=True)
class StartPoint:
    """The place where a run begins or resumes."""

    version: int = 0
    """The number of finished iterations."""
    state: RunState = RunState()


class Saver:
    """Saves and resumes one run, in Megatron's format; with --save-hf it saves in Hugging Face's too."""

    def __init__(
        self,
        settings: Settings,
        session: Session,
        policy: Policy,
        run: str,
        prompts: "PromptSource | DemonstrationSource | None",
        others: Mapping[str, FrozenModel],
        saved: Mapping[str, Any] | None = None,
        critic: Trainable | None = None,
    ):
        """`prompts` are the data of the run; only rank 0 has them. `saved` is added to every checkpoint.

        `others` are the frozen models by their roles, of which a checkpoint has the reference alone, once it has moved.
        """
        self._settings = settings
        self._session = session
        self._policy = policy
        self._run = run
        self._prompts = prompts
        self._stops = [] if prompts is None else list(prompts.stops)
        reference = others.get(REFERENCE.name)
        self._start = None if reference is None else reference.start
        self._weights = name_weights(others, critic, settings.served)
        self._checkpointer = Checkpointer(settings, session, policy, reference, saved, critic)
        self._loaded: tuple[int, Path] | None = None
        self._num_done = 0
        self.last_saved: Path | None = None
        self.last_hf: Path | None = None

    def load(self, say: Callable[[str], None]) -> StartPoint:
        """Load the checkpoint of --load, if there is one, and return where the run starts."""
        loaded = self._checkpointer.load()
        if loaded is None:
            return StartPoint()
        say(f"the run continues from {loaded.source}, version {loaded.version}")
        for note in loaded.notes:
            say(note)
        state = RunState()
        if loaded.extra:
            kept = self._session.run_or_raise_everywhere(lambda: self._take_over(loaded.extra, loaded.source))
            for note in compare_rounding(vars(kept), describe_rounding(self._settings)):
                say(note)
            state = RunState(kept.audit_head, kept.baseline)
        self._num_done = loaded.version
        if not self._settings.checkpoint.finetune:
            self._loaded = loaded.version, loaded.source
        self._complete(loaded.version, loaded.source, say)
        return StartPoint(loaded.version, state)

    def save_if_due(self, version: int, is_last: bool, state: RunState) -> None:
        """Save in both formats if that is due, after completing a checkpoint that was written in the background."""
        config, self._num_done = self._settings.checkpoint, version
        self._checkpointer.poll()
        if not is_save_due(self._settings, version, is_last):
            return
        if config.save_hf is not None:
            hf_folder = iteration_folder(config.save_hf, version)
            # An earlier attempt may have left a folder there, which does not match the checkpoint written now.
            self._session.run_on_first(lambda: withdraw(hf_folder))
        if config.save is not None:
            self._checkpointer.save(version, vars(self._describe(state)))
            self.last_saved = iteration_folder(config.save, version)
        if config.save_hf is not None:
            self._save_hf(hf_folder)

    def finish(self) -> None:
        """Wait until everything is written."""
        self._checkpointer.finish()

    def describe_loss(self) -> str:
        """Describe the newest checkpoint, the finished iterations that an interrupt loses, and the way to resume."""
        config = self._settings.checkpoint
        newest = None if config.save is None else latest_iteration(config.save)
        way = "the same command resumes from it"
        if config.save is not None and newest is not None:
            version, source = newest, iteration_folder(config.save, newest)
            if config.load != config.save or config.finetune or config.ckpt_step is not None:
                way = f"--load {config.save} without --finetune and --ckpt-step resumes from it"
        elif self._loaded is not None:
            version, source = self._loaded
        else:
            lost = _count(self._num_done, "")
            way = "the same command begins again" + ("; --save keeps checkpoints" if config.save is None else "")
            return f"no checkpoint exists; {lost}, and {way}"
        lost = _count(self._num_done - version, " after it")
        return f"the newest checkpoint is {source}, of iteration {version}; {lost}, and {way}"

    def _complete(self, version: int, source: Path, say: Callable[[str], None]) -> None:
        """Write the Hugging Face folder that is missing if the run was killed between a checkpoint and its folder."""
        folder = self._session.broadcast(find_missing_hf(self._settings, version))
        if folder is not None:
            say(f"{folder} is missing: it is written from {source}")
            self._save_hf(folder)

    def _save_hf(self, folder: Path) -> None:
        self._policy.synchronize()
        settings = self._settings
        dtype, base = settings.publish.dtype, self._policy.base
        if base is not None:
            # Before the weights, whose folder tells a resumed run that this one exists too.
            adapters = folder.with_name(f"{folder.name}_adapter")
            self._session.run_on_first(lambda: withdraw(adapters))
            base.save_adapters(self._session, adapters, dtype)
        self._policy.weights.save_hf(folder, settings.model.hf_model, dtype, self._stops)
        self.last_hf = folder

    def _describe(self, state: RunState) -> KeptState:
        return KeptState(
            run=self._run,
            stage=self._settings.run.stage,
            prompts=self._prompts.state() if self._prompts is not None else {},
            stops=self._stops,
            reference=self._start,
            audit_head=state.audit_head,
            plug_ins=describe_own_files(self._settings),
            objective=describe_objective(self._settings) | self._weights,
            baseline=state.baseline,
            **describe_rounding(self._settings),
        )

    def _take_over(self, extra: Mapping[str, Any], source: Path) -> KeptState:
        kept = read_kept_state(extra, source)
        if kept.run != self._run:
            raise InputError(
                f"{source} belongs to the run {kept.run!r}, and --rollout-folder names {self._run!r}: seeds of "
                f"responses follow from the name; write a folder of that name, or --finetune to begin a new run"
            )
        if kept.reference not in (None, self._start) and self._start is not None:
            raise InputError(
                f"{source} was trained against the reference {kept.reference[:12]}, and --grpo-ref-model (or "
                f"--hf-model) is {self._start[:12]}: write the folder that was meant, or --finetune"
            )
        if other := [name for name, value in self._weights.items() if kept.objective.get(name, value) != value]:
            raise InputError(
                f"{source} was trained with other {' and '.join(other)}: write the folder that was meant (--teacher, "
                f"--critic), or --finetune"
            )
        if self._prompts is not None:
            self._prompts.restore(kept.prompts)
        return kept


def name_weights(
    others: Mapping[str, FrozenModel], critic: Trainable | None, served: Mapping[str, str]
) -> dict[str, str]:
    """Return the fingerprints of other models' first weights, under the names that the audit log has for them.

    Teachers that engines compute have the hashes of their folders.
    """
    start = {**{role: other.start for role, other in others.items()}, **served}
    start |= {} if critic is None else {CRITIC: critic.start}
    return {f"weights of the {role}": fingerprint for role, fingerprint in start.items()}


def read_kept_state(
    extra: Mapping[str, Any],
    source: Path,
    remedy: str = "resume with that version, or write --finetune to begin with its weights",
) -> KeptState:
    """Read what a checkpoint keeps of its run; raise ForeignVersion if another version of megatron_rl wrote it."""
    names = [field.name for field in dataclasses.fields(KeptState)]
    if missing := sorted({*names} - extra.keys()):
        raise ForeignVersion(
            f"{source} was written by another version of megatron_rl (it lacks the run's {missing[0]}): {remedy}"
        )
    return KeptState(**{name: extra[name] for name in names})


def _count(number: int, place: str) -> str:
    """Return the words for a number of lost iterations."""
    return f"1 finished iteration{place} is lost" if number == 1 else f"{number} finished iterations{place} are lost"


def describe_rounding(settings: Settings) -> dict[str, Any]:
    """Describe what may follow from devices, and changes the order of sums."""
    config = settings.transformer
    modules = config.recompute_modules or () if config.recompute_granularity == "selective" else ()
    return {
        "micro_batch_size": settings.training.micro_batch_size,
        "recomputes_norms": "layernorm" in modules,
        "attention": settings.attention.backend,
        "attention_blocks": settings.attention.blocks,
    }


def compare_rounding(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note for each value of `describe_rounding` that is not that of the checkpoint."""
    size, before = own["micro_batch_size"], saved["micro_batch_size"]
    if size != before:
        yield (
            f"micro-batches have {size} responses, and had {before} before: gradients are summed in another order, and "
            f"--micro-batch-size {before} keeps it"
        )
    if saved["recomputes_norms"] != own["recomputes_norms"]:
        words, remedy = ("were not", PACK_FLAG) if own["recomputes_norms"] else ("were", RECOMPUTE_NORMS)
        yield (
            f"norms {words} computed again in the backward pass before, which rounds gradients in another way: "
            f"{remedy} keeps that"
        )
    for key, flag in (("attention", "--shared-prompt-backend"), ("attention_blocks", "--shared-prompt-blocks")):
        if (before := saved[key]) != own[key]:
            yield (
                f"attention was computed with {flag} {before} before, and is with {own[key]}, which sums in another "
                "order: that flag keeps it"
            )


def find_missing_hf(settings: Settings, version: int) -> Path | None:
    """Return the Hugging Face folder that is due for the loaded version and missing; None if there is none."""
    save_hf, num_iterations = settings.checkpoint.save_hf, settings.training.train_iters
    assert num_iterations is not None
    if save_hf is None or not is_save_due(settings, version, is_last=version >= num_iterations):
        return None
    folder = iteration_folder(save_hf, version)
    return None if folder.exists() else folder


def is_save_due(settings: Settings, version: int, is_last: bool) -> bool:
    """Return whether the run is to be saved after `version` iterations."""
    interval = settings.checkpoint.save_interval
    return version > 0 and (is_last or (interval is not None and version % interval == 0))
