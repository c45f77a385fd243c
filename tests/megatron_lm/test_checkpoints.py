"""Checkpoints that Megatron's own training code wrote."""

from pathlib import Path

from tests.megatron_lm.stock_training import write_and_read
from tests.ranks import run_ranks


def test_a_checkpoint_of_megatron_training_is_read_as_it_was_written(tmp_path: Path) -> None:
    for tensor, pipeline in ((1, 2), (2, 1)):
        folder = tmp_path / f"{tensor}-{pipeline}"
        for iteration, different in run_ranks(write_and_read, 2, folder, tensor, pipeline):
            assert iteration == 1
            assert different == []
