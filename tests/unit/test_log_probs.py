"""The fused output layer and log-probs, against the naive twin in float64; whole models are in tests/distributed.

Letters: N targets, E hidden size, V columns of the vocabulary.
"""

import dataclasses

import pytest
import torch

from megatron_rl.ops.log_probs import VocabularyShard, output_log_probs
from tests.naive_log_probs import naive_entropies, naive_log_probs
from tests.processes import run_python
from tests.ranks import run_ranks
from tests.truth import error_over_bound

REAL, PADDED, HIDDEN = 13, 16, 8
# The hidden state that predicts each target: some predict several, as a prompt's last one does.
ROWS = torch.tensor([0, 1, 2, 2, 2, 3, 4, 4, 0])
TARGETS = torch.tensor([0, 12, 5, 5, 7, 8, 9, 1, 6])


@dataclasses.dataclass
class Result:
    log_probs: torch.Tensor
    grad_hidden: torch.Tensor
    grad_weight: torch.Tensor

    def assert_near(self, theirs: "Result", truth: "Result") -> None:
        """Check that the result is as near to the truth as the naive form is in the same precision."""
        for field in dataclasses.fields(self):
            error = error_over_bound(*(getattr(result, field.name) for result in (self, theirs, truth)))
            assert error <= 1, f"{field.name}: {error:.2f}"

    def assert_equal(self, other: "Result") -> None:
        for field in dataclasses.fields(self):
            assert torch.equal(getattr(self, field.name), getattr(other, field.name)), field.name


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden_TE = torch.randn(5, HIDDEN, generator=generator).to(dtype)
    weight_VE = torch.randn(PADDED, HIDDEN, generator=generator).to(dtype)
    # Padded columns that win whenever they are looked at.
    hidden_TE[:, 0] = 1
    weight_VE[REAL:, 0] = 50
    return hidden_TE.requires_grad_(), weight_VE.requires_grad_()


def backward(values: torch.Tensor) -> None:
    """Run backward from a loss with uneven weights of both signs for targets, and others for entropies, if given."""
    places = torch.arange(values.numel(), dtype=values.dtype).reshape(values.shape)
    (values * torch.sin(places + 1)).sum().backward()


def fused(
    dtype: torch.dtype, temperature: float, block_columns: int | None = None, with_entropies: bool = False
) -> Result:
    hidden_TE, weight_VE = inputs(dtype)
    hidden_NE, shard = hidden_TE.index_select(0, ROWS), VocabularyShard(0, REAL)
    log_probs_N = output_log_probs(
        hidden_NE, weight_VE, TARGETS, shard, temperature, block_columns, with_entropies=with_entropies
    )
    backward(log_probs_N)
    return Result(log_probs_N.detach(), hidden_TE.grad, weight_VE.grad)


def naive(
    dtype: torch.dtype,
    temperature: float,
    compute_dtype: torch.dtype = torch.float64,
    with_entropies: bool = False,
) -> Result:
    """Compute the same inputs in another dtype."""
    hidden_TE, weight_VE = (tensor.detach().to(compute_dtype).requires_grad_() for tensor in inputs(dtype))
    hidden_NE = hidden_TE.index_select(0, ROWS)
    log_probs_N = naive_log_probs(hidden_NE, weight_VE, TARGETS, REAL, temperature)
    if with_entropies:
        entropies_N = naive_entropies(hidden_NE, weight_VE, REAL, temperature)
        log_probs_N = torch.stack((log_probs_N, entropies_N), dim=1)
    backward(log_probs_N)
    return Result(log_probs_N.detach(), hidden_TE.grad, weight_VE.grad)


def on_ranks(temperature: float, block_columns: int, with_entropies: bool = False) -> tuple[Result, int]:
    """Return this rank's results with the hidden states' gradient summed over ranks, and the number of reductions."""
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    all_reduce, num_reductions = torch.distributed.all_reduce, 0

    def counted(*arguments: object, **options: object) -> object:
        nonlocal num_reductions
        num_reductions += 1
        return all_reduce(*arguments, **options)

    torch.distributed.all_reduce = counted
    hidden_TE, weight_VE = inputs(torch.float32)
    mine_VE = weight_VE.detach().chunk(size)[rank].clone().requires_grad_()
    shard = VocabularyShard(rank * len(mine_VE), REAL, torch.distributed.group.WORLD)
    hidden_NE = hidden_TE.index_select(0, ROWS)
    log_probs_N = output_log_probs(
        hidden_NE, mine_VE, TARGETS, shard, temperature, block_columns, with_entropies=with_entropies
    )
    backward(log_probs_N)
    all_reduce(hidden_TE.grad)
    return Result(log_probs_N.detach(), hidden_TE.grad, mine_VE.grad), num_reductions


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
@pytest.mark.parametrize("block_columns", [None, 5, 1])
def test_results_and_gradients_equal_the_naive_ones_of_the_real_columns(
    temperature: float, block_columns: int | None
) -> None:
    ours = fused(torch.float32, temperature, block_columns)
    ours.assert_near(naive(torch.float32, temperature, torch.float32), naive(torch.float32, temperature))
    assert (ours.grad_weight[REAL:] == 0).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("block_columns", [None, 5, 1])
def test_entropies_and_their_gradients_equal_the_naive_ones(temperature: float, block_columns: int | None) -> None:
    ours = fused(torch.float32, temperature, block_columns, with_entropies=True)
    theirs, truth = (
        naive(torch.float32, temperature, dtype, with_entropies=True) for dtype in (torch.float32, torch.float64)
    )
    ours.assert_near(theirs, truth)
    assert torch.equal(ours.log_probs[:, 0], fused(torch.float32, temperature, block_columns).log_probs)
    assert (ours.grad_weight[REAL:] == 0).all()


@pytest.mark.parametrize("block_columns", [None, 5])
def test_bfloat16_is_as_near_to_the_truth_as_the_naive_form(block_columns: int | None) -> None:
    ours, truth = fused(torch.bfloat16, 0.7, block_columns), naive(torch.bfloat16, 0.7)
    same_dtype = naive(torch.bfloat16, 0.7, torch.bfloat16)
    assert ours.log_probs.dtype == torch.float32
    assert ours.grad_hidden.dtype == ours.grad_weight.dtype == torch.bfloat16
    for field in dataclasses.fields(Result):
        expected = getattr(truth, field.name)
        error, naive_error = (
            (getattr(result, field.name) - expected).abs().max().item() for result in (ours, same_dtype)
        )
        assert error <= 2 * naive_error, field.name


def test_a_vocabulary_divided_over_ranks_gives_the_same_even_where_a_rank_holds_only_padding() -> None:
    # Of four columns each the last rank has one real one, of two columns each it has none.
    for size, block_columns, with_entropies in ((2, 3, False), (4, 3, False), (4, 1, False), (4, 1, True)):
        theirs, truth = (naive(torch.float32, 0.7, dtype, with_entropies) for dtype in (torch.float32, torch.float64))
        ranks = run_ranks(on_ranks, size, 0.7, block_columns, with_entropies)
        grad_weight = torch.cat([result.grad_weight for result, _ in ranks])
        for result, num_reductions in ranks:
            dataclasses.replace(result, grad_weight=grad_weight).assert_near(theirs, truth)
            assert num_reductions == 2


def test_the_gradient_is_that_of_finite_differences() -> None:
    hidden_TE, weight_VE = inputs(torch.float64)

    def of_inputs(hidden_TE: torch.Tensor, weight_VE: torch.Tensor) -> torch.Tensor:
        hidden_NE = hidden_TE.index_select(0, ROWS)
        return output_log_probs(hidden_NE, weight_VE, TARGETS, VocabularyShard(0, REAL), 0.7, 5)

    assert torch.autograd.gradcheck(of_inputs, (hidden_TE, weight_VE))


def test_gradients_overwrite_uninitialised_memory_and_are_the_same_each_time() -> None:
    first = fused(torch.bfloat16, 0.7, 5)
    torch.use_deterministic_algorithms(True)
    try:
        # Memory that nothing was written to holds NaN here.
        assert torch.empty(3).isnan().all()
        fused(torch.bfloat16, 0.7, 5).assert_equal(first)
    finally:
        torch.use_deterministic_algorithms(False)


def test_log_probs_are_the_same_with_and_without_gradients() -> None:
    hidden_TE, weight_VE = inputs(torch.float32)
    hidden_NE, shard = hidden_TE.index_select(0, ROWS), VocabularyShard(0, REAL)
    log_probs_N = output_log_probs(hidden_NE, weight_VE, TARGETS, shard, 0.7, 5)
    assert log_probs_N.requires_grad
    with torch.no_grad():
        alone_N = output_log_probs(hidden_NE, weight_VE, TARGETS, shard, 0.7, 5)
    assert not alone_N.requires_grad
    assert torch.equal(alone_N, log_probs_N)


@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_a_frozen_input_gets_no_gradient_and_leaves_the_others_unchanged(frozen: str) -> None:
    expected = fused(torch.float32, 1.0)
    hidden_TE, weight_VE = inputs(torch.float32)
    (weight_VE if frozen == "weight" else hidden_TE).requires_grad_(False)
    backward(output_log_probs(hidden_TE.index_select(0, ROWS), weight_VE, TARGETS, VocabularyShard(0, REAL)))
    if frozen == "weight":
        assert weight_VE.grad is None
        assert torch.equal(hidden_TE.grad, expected.grad_hidden)
    else:
        assert hidden_TE.grad is None
        assert torch.equal(weight_VE.grad, expected.grad_weight)


def test_no_targets_give_no_log_probs_and_gradients_of_zero() -> None:
    hidden_TE, weight_VE = inputs(torch.float32)
    result = output_log_probs(hidden_TE[:0], weight_VE, TARGETS[:0], VocabularyShard(0, REAL))
    result.sum().backward()
    assert result.shape == (0,)
    assert (hidden_TE.grad == 0).all()
    assert (weight_VE.grad == 0).all()


def test_one_target_gives_one_log_prob() -> None:
    hidden_TE, weight_VE = inputs(torch.float32)
    result = output_log_probs(hidden_TE[:1], weight_VE, TARGETS[:1], VocabularyShard(0, REAL), 0.7)
    theirs, truth = (naive(torch.float32, 0.7, dtype).log_probs[:1] for dtype in (torch.float32, torch.float64))
    assert error_over_bound(result.detach(), theirs, truth) <= 1


def test_a_target_outside_the_vocabulary_has_no_log_prob() -> None:
    hidden_TE, weight_VE = inputs(torch.float32)
    targets_N = TARGETS.clone()
    targets_N[:3] = torch.tensor([REAL, PADDED + 100, -1])
    log_probs_N = output_log_probs(hidden_TE.index_select(0, ROWS), weight_VE, targets_N, VocabularyShard(0, REAL))
    assert log_probs_N.isnan().tolist() == [True] * 3 + [False] * 6


def test_a_temperature_must_be_above_0() -> None:
    hidden_TE, weight_VE = inputs(torch.float32)
    with pytest.raises(ValueError, match="temperature 0 must be above 0"):
        output_log_probs(hidden_TE.index_select(0, ROWS), weight_VE, TARGETS, VocabularyShard(0, REAL), 0)


@pytest.mark.each_change
def test_neither_pass_holds_an_array_of_all_logits() -> None:
    printed = run_python("""
        from benchmarks.log_probs_memory import Shape, peak_over_logits

        print(peak_over_logits(Shape(num_targets=2048, vocab_size=80000, hidden_size=16)))
    """)
    assert float(printed.splitlines()[-1]) < 0.6
