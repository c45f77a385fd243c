"""The fused output layer and log-probs by torch's operations, and a vocabulary that ranks divide.

Whole models are in tests/distributed. Letters: N targets, E hidden size, V columns of the vocabulary.
"""

import pytest
import torch

from megatron_rl.ops.log_probs import VocabularyShard, output_log_probs
from tests.kernels.output_layer_contract import *  # noqa: F403 - the tests of every backend
from tests.kernels.output_layer_contract import PADDING, Problem, Results
from tests.processes import run_python
from tests.ranks import run_ranks
from tests.truth import assert_near

VOCAB_SIZE = 13
PROBLEM = Problem(9, VOCAB_SIZE)
SHARD = VocabularyShard(0, VOCAB_SIZE)


def on_ranks(problem: Problem, block_columns: int) -> tuple[Results, int]:
    """Return this rank's results with the hidden states' gradient summed over ranks, and the number of reductions."""
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    all_reduce, num_reductions = torch.distributed.all_reduce, 0

    def counted(*arguments: object, **options: object) -> object:
        nonlocal num_reductions
        num_reductions += 1
        return all_reduce(*arguments, **options)

    torch.distributed.all_reduce = counted
    num_columns = (VOCAB_SIZE + PADDING) // size
    shard = VocabularyShard(rank * num_columns, VOCAB_SIZE, torch.distributed.group.WORLD)
    out, grad_hidden_NE, grad_weight_VE = problem.ours(block_columns, shard, (rank + 1) * num_columns)
    all_reduce(grad_hidden_NE)
    return (out, grad_hidden_NE, grad_weight_VE), num_reductions


def test_a_vocabulary_divided_over_ranks_gives_the_same_in_two_reductions() -> None:
    # The last one of four ranks has one real column.
    for size, block_columns, with_entropies in ((2, 3, False), (4, 3, False), (4, 1, False), (4, 1, True)):
        problem = Problem(9, VOCAB_SIZE, with_entropies=with_entropies)
        ranks = run_ranks(on_ranks, size, problem, block_columns)
        grad_weight_VE = torch.cat([grad_weight_VE for (*_, grad_weight_VE), _ in ranks])
        for (out, grad_hidden_NE, _), num_reductions in ranks:
            problem.assert_near((out, grad_hidden_NE, grad_weight_VE))
            assert num_reductions == 2


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
@pytest.mark.parametrize("block_columns", [None, 5, 1])
def test_each_result_is_as_near_to_the_truth_as_the_naive_ones_by_its_own_largest(
    temperature: float, block_columns: int | None
) -> None:
    for with_entropies in (False, True):
        problem = Problem(9, VOCAB_SIZE, torch.float32, temperature, with_entropies)
        assert_near(problem.ours(block_columns), problem.naive(torch.float32), problem.naive(torch.float64))


@pytest.mark.parametrize("block_columns", [None, 5, 1])
def test_log_probs_are_the_same_bits_with_and_without_entropies_and_gradients(block_columns: int | None) -> None:
    log_probs_N = Problem(9, VOCAB_SIZE, with_entropies=False).ours(block_columns)[0]
    assert torch.equal(PROBLEM.ours(block_columns)[0][:, 0], log_probs_N)
    hidden_NE, weight_VE = PROBLEM.draw()
    alone_N = output_log_probs(hidden_NE, weight_VE, PROBLEM.targets_N, SHARD, 0.7, block_columns)
    assert not alone_N.requires_grad
    assert torch.equal(alone_N, log_probs_N)


def test_the_gradient_is_that_of_finite_differences() -> None:
    inputs = [tensor.double().requires_grad_() for tensor in PROBLEM.draw()]
    assert torch.autograd.gradcheck(
        lambda hidden_NE, weight_VE: output_log_probs(hidden_NE, weight_VE, PROBLEM.targets_N, SHARD, 0.7, 5), inputs
    )


def test_a_temperature_must_be_above_0() -> None:
    with pytest.raises(ValueError, match="temperature 0 must be above 0"):
        output_log_probs(*PROBLEM.draw(), PROBLEM.targets_N, SHARD, 0)


@pytest.mark.each_change
def test_neither_pass_holds_an_array_of_all_logits() -> None:
    printed = run_python("""
        from benchmarks.log_probs_memory import Shape, peak_over_logits

        print(peak_over_logits(Shape(num_targets=2048, vocab_size=80000, hidden_size=16)))
    """)
    assert float(printed.splitlines()[-1]) < 0.6
