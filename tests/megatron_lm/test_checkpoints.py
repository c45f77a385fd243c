"""Checkpoints that Megatron's own training code wrote, or reads."""

from pathlib import Path

import pytest
import torch

from tests.megatron_lm.stock_training import load_ours, write_and_read, write_ours
from tests.ranks import run_ranks


def test_a_checkpoint_of_megatron_training_is_read_as_it_was_written(tmp_path: Path) -> None:
    for tensor, pipeline in ((1, 2), (2, 1)):
        folder = tmp_path / f"{tensor}-{pipeline}"
        for iteration, different in run_ranks(write_and_read, 2, folder, tensor, pipeline):
            assert iteration == 1
            assert different == []


@pytest.mark.parametrize("buckets", ["", "--overlap-grad-reduce --ddp-bucket-size 9000"], ids=["one", "several"])
def test_megatron_training_reads_what_the_distributed_optimizer_was_saved_with(tmp_path: Path, buckets: str) -> None:
    layout = f"--use-distributed-optimizer {buckets}"
    written = run_ranks(write_ours, 2, tmp_path, layout)
    read = run_ranks(load_ours, 2, tmp_path, layout)
    for of_ours, (iteration, of_stock) in zip(written, read, strict=True):
        assert iteration == 1
        for (start, name, ours), (stock_start, stock_name, stock) in zip(of_ours, of_stock, strict=True):
            assert (start, name) == (stock_start, stock_name)
            for what, values in ours.items():
                assert torch.equal(values, stock[what]), f"{what} of {name}"
