"""The state that a run trains, saved and loaded. With --async-save, training continues during a save.

The trainer's own state besides model and optimizer (data position, version, identities) is passed as `extra`, a
dictionary that JSON can hold.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from megatron_rl.config.settings import ScheduleConfig, Settings
from megatron_rl.errors import InputError
from megatron_rl.trainer.mcore.checkpoint import folders, serialization, state_dict
from megatron_rl.trainer.mcore.checkpoint.serialization import Prepared
from megatron_rl.trainer.mcore.checkpoint.state_dict import CONTENT
from megatron_rl.trainer.mcore.session import Session
from megatron_rl.trainer.mcore.step.optimizer import resolve_schedule
from megatron_rl.trainer.mcore.step.policy import BASE, FrozenModel, Policy, Trainable

EXTRA = "megatron_rl"
"""The key of the trainer's own state in a checkpoint."""
# The version of the policy that had the saved reference's weights, if they were saved.
_REFERENCE_VERSION = "megatron_rl_reference"
# Settings of strictness with which the model keeps its own values where the checkpoint has none.
_LENIENT = ("log_all", "return_all", "ignore_all")


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The state that a run resumes from: its finished iterations, the saved `extra`, and notes to print once."""

    version: int
    extra: Mapping[str, Any]
    notes: tuple[str, ...]
    source: Path


class Checkpointer:
    """Writes and reads the checkpoints of one run. Every method is called on every rank."""

    def __init__(
        self,
        settings: Settings,
        session: Session,
        policy: Policy,
        reference: FrozenModel | None = None,
        saved: Mapping[str, Any] | None = None,
        critic: Trainable | None = None,
    ):
        """Save a `reference` only after it has moved, and a `critic` always."""
        self._config = settings.checkpoint
        self._schedule = settings.schedule
        self._session = session
        self._policy = policy
        self._reference = reference
        self._saved = saved or {}
        self._critic = critic
        self._queue = AsyncCallsQueue()
        self._pending: tuple[int, Prepared] | None = None
        # The iteration in the --save folder that this run resumed from, if it did.
        self._loaded: int | None = None

    def save(self, version: int, extra: Mapping[str, Any]) -> None:
        """Write the current state, with rank 0's `extra`.

        With --async-save it is written in the background: call `poll` meanwhile, and `finish` in the end.
        """
        folder = self._config.save
        assert folder is not None
        self.finish()
        self._policy.synchronize()
        noted = self._session.broadcast(json.loads(json.dumps(extra)))
        prepared = serialization.prepare(
            lambda: self._collect_state(version, noted),
            folder,
            version,
            self._session,
            self._config.ckpt_fully_parallel_save,
            self._loaded,
        )
        if self._config.async_save:
            serialization.finish(self._session, prepared, lambda: self._queue.schedule_async_request(prepared.request))
            self._pending = version, prepared
        else:
            serialization.finish(self._session, prepared, prepared.write_now)
            self._prune(version)

    def poll(self) -> None:
        """Make the checkpoint that is being written the newest if it is complete, without waiting for it."""
        self.finish(is_waiting=False)

    def finish(self, is_waiting: bool = True) -> None:
        """Wait until no checkpoint is being written, or do as `poll` does."""
        if self._pending is None:
            return
        version, prepared = self._pending
        try:
            serialization.finish(
                self._session, prepared, lambda: self._queue.maybe_finalize_async_calls(blocking=is_waiting)
            )
        except BaseException:
            self._pending = None
            raise
        if not self._queue.get_num_unfinalized_calls():
            self._pending = None
            self._prune(version)

    def load(self) -> Loaded | None:
        """Load the checkpoint of --load. Without one, return None and leave the state as it was built."""
        config = self._config
        self._session.run_or_raise_everywhere(lambda: folders.check_own(config.save, config.load))
        if config.load is None:
            return None
        folder = config.load
        holds_one = self._session.run_or_raise_everywhere(
            lambda: config.ckpt_step is not None or folders.holds_checkpoint(folder)
        )
        if not holds_one and not config.exit_on_missing_checkpoint:
            return None
        found, source = self._session.run_or_raise_everywhere(lambda: serialization.find(folder, config.ckpt_step))
        version = 0 if config.finetune else found
        self._loaded = self._session.run_or_raise_everywhere(lambda: folders.find_resumed(config.save, version, source))
        return self._load(version, source)

    def _load(self, version: int, source: Path) -> Loaded:
        config, session = self._config, self._session
        found, common = session.run_or_raise_everywhere(
            lambda: (serialization.read_metadata(source), serialization.read_common(source))
        )
        if EXTRA not in common and not config.finetune:
            raise InputError(
                f"{source} was not written by megatron_rl: write --finetune to begin at version 0 with its weights"
            )
        base = self._policy.base
        if base is not None:
            session.run_or_raise_everywhere(lambda: base.check(common, source))
        # A run that begins at version 0 has the critic of its flag.
        critic = None if config.finetune else self._critic
        if critic is not None and not any(name.startswith(state_dict.CRITIC) for name in found):
            raise InputError(f"{source} was trained without --critic: drop the flag, or write --finetune")
        content = serialization.get_content(common)
        has_optimizer = not (config.finetune or config.no_load_optim)
        if has_optimizer:
            session.run_or_raise_everywhere(lambda: self._check_optimizer(common, source))
        wants_rng = not (config.finetune or config.no_load_rng)
        has_rng = wants_rng and all(session.gather(state_dict.has_rng_of_layout(found)))
        is_lenient = config.dist_ckpt_strictness in _LENIENT
        moved = None if config.finetune else common.get(_REFERENCE_VERSION)
        reference = None if moved is None else self._reference
        if not is_lenient:
            session.run_or_raise_everywhere(
                lambda: serialization.check(self._weights(reference, critic, content), found, source)
            )

        wanted = serialization.run_together(
            session,
            lambda: self._describe_wanted(reference, critic, content, has_optimizer, has_rng),
            serialization.unreadable(source),
        )
        parallel = config.ckpt_fully_parallel_load
        loaded = serialization.read(wanted, found, source, session, config.dist_ckpt_strictness, parallel)
        is_overriding = self._schedule.override_opt_param_scheduler
        for prefix, trained in (("", self._policy), (state_dict.CRITIC, critic)):
            if trained is None:
                continue
            state_dict.apply_model(trained.chunks, loaded, not is_lenient, prefix)
            if has_optimizer:
                session.run_or_raise_everywhere(
                    lambda trained=trained, prefix=prefix: state_dict.apply_optimizer(  # type: ignore[misc]
                        trained, loaded, is_overriding, prefix
                    )
                )
            else:
                trained.optimizer.reload_model_params()
        if has_rng:
            state_dict.apply_rng(loaded, session.platform)
        if reference is not None:
            assert moved is not None
            state_dict.apply_model(reference.models, loaded, not is_lenient, state_dict.REFERENCE)
            reference.resume(moved)
        notes = self._make_notes(has_optimizer, wants_rng and not has_rng, source)
        return Loaded(version, {} if config.finetune else common.get(EXTRA, {}), notes, source)

    def _collect_state(self, version: int, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Collect the state under Megatron's names, and our own state under our keys."""
        state: dict[str, Any] = {"iteration": version, "checkpoint_version": 3.0, EXTRA: dict(extra)}
        state |= self._saved
        if self._policy.base is not None:
            state[BASE] = self._policy.base.fingerprint
        reference = self._reference
        if reference is not None and reference.version is not None:
            state[_REFERENCE_VERSION] = reference.version
        else:
            reference = None
        state |= self._weights(reference, self._critic, CONTENT)
        if not self._config.no_save_rng:
            state |= state_dict.get_rng_state(self._session.platform)
        return state if self._config.no_save_optim else state | self._describe_optimizers(state, self._critic, CONTENT)

    def _weights(
        self, reference: FrozenModel | None, critic: Trainable | None, content: Mapping[str, Any]
    ) -> dict[str, Any]:
        state = state_dict.build_model_state(self._policy.chunks, content)
        if reference is not None:
            state |= state_dict.build_other_state(state_dict.REFERENCE, reference.models, content)
        if critic is not None:
            state |= state_dict.build_other_state(state_dict.CRITIC, critic.chunks, content)
        return state

    def _describe_optimizers(
        self, state: Mapping[str, Any], critic: Trainable | None, content: Mapping[str, Any], is_loading: bool = False
    ) -> dict[str, Any]:
        described = state_dict.build_optimizer_state(self._policy, state, content, is_loading)
        if critic is not None:
            described |= state_dict.build_optimizer_state(critic, state, content, is_loading, state_dict.CRITIC)
        return described

    def _describe_wanted(
        self,
        reference: FrozenModel | None,
        critic: Trainable | None,
        content: Mapping[str, Any],
        has_optimizer: bool,
        has_rng: bool,
    ) -> dict[str, Any]:
        wanted = self._weights(reference, critic, content)
        if has_optimizer:
            described = self._describe_optimizers(wanted, critic, content, is_loading=True)
            wanted |= {name: part for name, part in described.items() if name.endswith("optimizer")}
        return wanted | (state_dict.get_rng_state(self._session.platform) if has_rng else {})

    def _prune(self, version: int) -> None:
        config = self._config
        assert config.save is not None
        if self._session.rank == 0:
            folders.prune(config.save, version, config.keep_last, config.save_retain_interval)

    def _check_optimizer(self, common: Mapping[str, Any], source: Path) -> None:
        if "optimizer" not in common or SAVED not in common:
            raise InputError(
                f"{source} holds no optimizer: write --no-load-optim to start with a new optimizer, or --finetune"
            )
        own = {name: value for name, value in self._policy.scheduler.state_dict().items() if name != "num_steps"}
        check_schedule(own, common[SAVED], self._schedule, source)
        has_several = isinstance(common["optimizer"], dict) and 0 in common["optimizer"]
        if has_several != (len(getattr(self._policy.optimizer, "chained_optimizers", ())) > 1):
            size = "above 1" if has_several else "of 1"
            raise InputError(
                f"{source} was written with --expert-model-parallel-size {size}, where experts have "
                f"{'an optimizer of their own' if has_several else 'no optimizer of their own'}: use a size {size}, or "
                f"write --no-load-optim"
            )
        # Optimizers are numbered if experts have an optimizer of their own.
        is_sharded = "param_state_sharding_type" in (common["optimizer"][0] if has_several else common["optimizer"])
        is_wanted = self._policy.wrapped[0].ddp_config.use_distributed_optimizer
        if is_sharded != is_wanted:
            change = "add it" if is_sharded else "drop it"
            how = "with" if is_sharded else "without"
            raise InputError(
                f"{source} was written {how} --use-distributed-optimizer: {change}, or write --no-load-optim"
            )

    def _make_notes(self, has_optimizer: bool, is_rng_new: bool, source: Path) -> tuple[str, ...]:
        notes = []
        if not has_optimizer:
            notes.append(f"only weights were loaded from {source}: optimizer and schedule start from the beginning")
        if is_rng_new:
            notes.append(
                f"{source} has no random state for this layout: random numbers start from --seed again (write "
                f"--no-load-rng to hide this note)"
            )
        return tuple(notes)


SAVED = "opt_param_scheduler"


def check_loaded_schedule(settings: Settings, num_updates: int) -> None:
    """Raise an InputError if the checkpoint that --load names has another schedule than the flags."""
    config = settings.checkpoint
    loaded = folders.find_named(config.load, config.ckpt_step)
    if loaded is None or config.finetune or config.no_load_optim:
        return
    _, source = loaded
    saved = serialization.read_common(source).get(SAVED)
    if saved is not None:
        check_schedule(resolve_schedule(settings, num_updates), saved, settings.schedule, source)


def check_schedule(own: Mapping[str, Any], saved: Mapping[str, Any], config: ScheduleConfig, source: Path) -> None:
    """Raise an InputError that names the flags by which the schedules differ, unless a flag decides for one of them.

    Both use the scheduler's names. Values that the checkpoint lacks are not compared.
    """
    if config.override_opt_param_scheduler or config.use_checkpoint_opt_param_scheduler:
        return
    # One flag may decide several values.
    differences = {
        f"{_flag(name, config)} {value} (the checkpoint's is {saved[name]})": None
        for name, value in own.items()
        if name in saved and saved[name] != value
    }
    if differences:
        raise InputError(
            f"{source} was saved with another schedule than the flags give: {', '.join(differences)}, counted in "
            f"updates. Write --override-opt-param-scheduler to continue with the flags' schedule from the "
            f"checkpoint's update. Or write --use-checkpoint-opt-param-scheduler to continue with the checkpoint's, "
            f"which keeps its last value after its end"
        )


def _flag(name: str, config: ScheduleConfig) -> str:
    if name == "lr_decay_steps":
        return "--train-iters" if config.lr_decay_iters is None else "--lr-decay-iters"
    if name == "lr_warmup_steps":
        return "--lr-warmup-iters" if config.lr_warmup_fraction is None else "--lr-warmup-fraction"
    if name == "start_wd":
        return "--weight-decay" if config.start_weight_decay is None else "--start-weight-decay"
    if name == "end_wd":
        return "--weight-decay" if config.end_weight_decay is None else "--end-weight-decay"
    return _FLAGS[name]


_FLAGS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "lr_decay_style": "--lr-decay-style",
    "wd_incr_steps": "--train-iters",
    "wd_incr_style": "--weight-decay-incr-style",
}
