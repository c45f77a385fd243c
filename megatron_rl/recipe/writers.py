"""Metrics through the writers that Megatron opened: TensorBoard's, Weights & Biases', one_logger."""

from collections.abc import Mapping
from typing import Any


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
