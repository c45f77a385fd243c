"""Vocabulary-parallel log-probs, on one rank here; the layouts are in tests/distributed."""

import pytest
import torch

from megatron_rl.ops.log_probs import VocabularyShard, vocabulary_parallel_log_probs
from tests.ranks import run_ranks

REAL, PADDED = 13, 16


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(9, PADDED, generator=generator)
    # A padded column that wins whenever it is not masked.
    logits[:, REAL:] = 50.0
    targets = torch.tensor([0, 12, 5, 5, 7, 8, 9, 1, 6])
    return logits, targets, torch.sin(torch.arange(9.0) + 1)


def reference(temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logits, targets, weights = inputs()
    logits.requires_grad_()
    scaled = logits[:, :REAL] / temperature
    log_probs = scaled.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (log_probs * weights).sum().backward()
    return log_probs.detach(), logits.grad


def on_ranks(temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    logits, targets, weights = inputs()
    mine = logits.chunk(size, dim=1)[rank].clone().requires_grad_()
    shard = VocabularyShard(rank * mine.shape[1], REAL, torch.distributed.group.WORLD)
    log_probs = vocabulary_parallel_log_probs(mine, targets, shard, temperature)
    (log_probs * weights).sum().backward()
    return log_probs.detach(), mine.grad


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
def test_log_probs_and_gradients_are_those_of_a_softmax_over_the_real_columns(temperature: float) -> None:
    logits, targets, weights = inputs()
    logits.requires_grad_()
    log_probs = vocabulary_parallel_log_probs(logits, targets, VocabularyShard(0, REAL), temperature)
    (log_probs * weights).sum().backward()
    expected, gradient = reference(temperature)
    torch.testing.assert_close(log_probs.detach(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits.grad, gradient, rtol=0, atol=1e-6)
    assert (logits.grad[:, REAL:] == 0).all()


def test_a_vocabulary_divided_over_ranks_gives_the_same_even_where_a_rank_holds_only_padding() -> None:
    expected, gradient = reference(0.7)
    # Of four columns each the last rank has one real one, of two columns each it has none.
    for size in (2, 4):
        ranks = run_ranks(on_ranks, size, 0.7, platform=None)
        for log_probs, _ in ranks:
            torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(torch.cat([g for _, g in ranks], dim=1), gradient, rtol=0, atol=1e-6)


def test_no_targets_give_no_log_probs() -> None:
    logits = torch.randn(0, 8, requires_grad=True)
    result = vocabulary_parallel_log_probs(logits, torch.zeros(0, dtype=torch.long), VocabularyShard(0, 8))
    result.sum().backward()
    assert result.shape == (0,)


def test_a_target_outside_the_vocabulary_has_no_log_prob() -> None:
    logits, targets, _ = inputs()
    targets[:3] = torch.tensor([REAL, PADDED + 100, -1])
    log_probs = vocabulary_parallel_log_probs(logits, targets, VocabularyShard(0, REAL))
    assert log_probs.isnan().tolist() == [True] * 3 + [False] * 6
