"""Metrics through the writers that Megatron opened, TensorBoard's, Weights & Biases', one_logger; and its timers."""

import argparse
from collections.abc import Mapping
from typing import Any

# What its schedules and optimizers measure; the same on every rank, since all report together.
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
    """A sink of the metrics of an iteration; a writer that was not asked for is None."""

    def __init__(self, tensorboard: Any, wandb: Any, one_logger: Any) -> None:
        self._tensorboard = tensorboard
        self._wandb = wandb
        self._one_logger = one_logger

    def write(self, version: int, values: Mapping[str, float]) -> None:
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, version)
            # Else a kill loses the last two minutes.
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
    """On the rank on which Megatron opened them."""
    from megatron.training import global_vars

    writers = (global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer(), global_vars.get_one_logger())
    return [MegatronWriters(*writers)]


class MegatronTimers:
    """Reports what Megatron's timers say of the last iterations, as its own training does: with --timing-log-level."""

    def __init__(self, args: argparse.Namespace, interval: int) -> None:
        from megatron.training import global_vars

        self.timers = global_vars.get_timers()
        """For the configurations of model and optimizer."""
        self._is_asked = args.timing_log_level > 0
        self._is_written = args.log_timers_to_tensorboard
        self._is_last = args.rank == args.world_size - 1
        self._interval = interval

    def finish_iteration(self, version: int) -> None:
        """All ranks together; the last one prints, as Megatron's does, which needs its own set-up of logging for it."""
        if not self._is_asked or (version + 1) % self._interval:
            return
        from megatron.training import global_vars

        if self._is_written:
            writer = global_vars.get_tensorboard_writer()
            self.timers.write(_TIMED, writer, version, normalizer=self._interval, reset=False)
        said = self.timers.get_all_timers_string(_TIMED, normalizer=self._interval)
        if said is not None and self._is_last:
            print(said, flush=True)
