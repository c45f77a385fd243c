"""Megatron's writers, TensorBoard, Weights & Biases and one_logger, as sinks of our metrics; and its timers."""

import argparse
from collections.abc import Mapping
from typing import Any

# The timers of its schedules and optimizers; the same on every rank, since all report together.
_TIMED = (
    "forward-backward", "forward-compute", "backward-compute", "forward-recv", "forward-send", "backward-recv",
    "backward-send", "forward-send-forward-recv", "forward-send-backward-recv", "backward-send-forward-recv",
    "backward-send-backward-recv", "forward-backward-send-forward-backward-recv", "all-grads-sync",
    "non-tensor-parallel-grads-all-reduce", "layernorm-grads-all-reduce", "embedding-grads-all-reduce",
    "conditional-embedder-grads-all-reduce", "params-all-gather", "optimizer-copy-to-main-grad",
    "optimizer-unscale-and-check-inf", "optimizer-clip-main-grad", "optimizer-count-zeros", "optimizer-inner-step",
    "optimizer-copy-main-to-model-params",
)  # fmt: skip


class MegatronWriters:
    """A sink of an iteration's metrics; a writer is None if no flag asks for it."""

    def __init__(self, tensorboard: Any, wandb: Any, one_logger: Any) -> None:
        self._tensorboard = tensorboard
        self._wandb = wandb
        self._one_logger = one_logger

    def write(self, version: int, values: Mapping[str, float]) -> None:
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, version)
            # Otherwise a kill would lose the last two minutes.
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(dict(values), version)
        if self._one_logger is not None:
            self._one_logger.log_metrics({**values, "train_iterations": version + 1})

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
        if self._one_logger is not None:
            self._one_logger.finish()


def open_writers() -> list[MegatronWriters]:
    """Return the writers of this process, as a sink; Megatron opens them on one rank."""
    from megatron.training import global_vars

    writers = (global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer(), global_vars.get_one_logger())
    return [MegatronWriters(*writers)]


class MegatronTimers:
    """Reports Megatron's timers of the last iterations, as its own training does with --timing-log-level."""

    def __init__(self, args: argparse.Namespace, interval: int) -> None:
        from megatron.training import global_vars

        self.timers = global_vars.get_timers()
        """The timers, for the configurations of model and optimizer."""
        self._is_asked = args.timing_log_level > 0
        self._is_written = args.log_timers_to_tensorboard
        self._is_last = args.rank == args.world_size - 1
        self._interval = interval

    def finish_iteration(self, version: int) -> None:
        """Report the timers if that is due; all ranks call it together. The last rank prints, as Megatron's does.

        It prints by itself, since Megatron prints through a set-up of logging that is not ours.
        """
        if not self._is_asked or (version + 1) % self._interval:
            return
        from megatron.training import global_vars

        if self._is_written:
            writer = global_vars.get_tensorboard_writer()
            self.timers.write(_TIMED, writer, version, normalizer=self._interval, reset=False)
        said = self.timers.get_all_timers_string(_TIMED, normalizer=self._interval)
        if said is not None and self._is_last:
            print(said, flush=True)
