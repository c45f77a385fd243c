"""Checks, before loading, that a run and its checkpoint have the same schedule."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.settings import ScheduleConfig, Settings
from megatron_rl.errors import InputError
from megatron_rl.trainer.mcore.checkpoint import folders, serialization
from megatron_rl.trainer.mcore.step.optimizer import resolve_schedule

SAVED = "opt_param_scheduler"


def check_loaded_schedule(settings: Settings, num_updates: int) -> None:
    """Raise an InputError if the checkpoint that --load names has another schedule than the flags."""
    config = settings.checkpoint
    if config.load is None or config.finetune or config.no_load_optim:
        return
    if config.ckpt_step is None and not folders.holds_checkpoint(config.load):
        return
    _, source = folders.find(config.load, config.ckpt_step)
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
    """Return the flag that decides a value."""
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
