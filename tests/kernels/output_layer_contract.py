"""The contract of the output layer's backends against the naive form in float64, forward and all gradients.

`tests/unit/test_log_probs.py` has these tests for `torch`, and `interpreted_output_layer.py` has them for `triton`.

Letters: N targets, E hidden size, V columns of the vocabulary.
"""

import dataclasses
import functools
import itertools
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_rl.ops.log_probs import VocabularyShard, output_log_probs, triton_fused
from tests.kernels.conftest import unwritten_memory_is_nan  # noqa: F401 - a fixture of the tests below
from tests.naive_log_probs import naive_entropies, naive_log_probs
from tests.truth import assert_near

# Products of the masked columns' infinities, which nothing reads.
pytestmark = [
    pytest.mark.usefixtures("unwritten_memory_is_nan"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
BACKEND = "triton" if os.environ.get("TRITON_INTERPRET") == "1" else "torch"
HIDDEN, PADDING = 8, 3
OFTEN = [(BF16, False, 1.0), (BF16, True, 0.7), (FP16, True, 1.0)]
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Hidden states, a weight whose padded columns win whenever they are looked at, targets, and gradients."""

    num_rows: int
    vocab_size: int
    dtype: torch.dtype = FP32
    temperature: float = 0.7
    with_entropies: bool = True
    scale: float = 1.0

    @functools.cached_property
    def targets_N(self) -> torch.Tensor:
        return torch.randint(self.vocab_size, (self.num_rows,), generator=torch.Generator().manual_seed(5))

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.num_rows + self.vocab_size)
        hidden_NE = self.scale * torch.randn(self.num_rows, HIDDEN, generator=generator)
        weight_VE = torch.randn(self.vocab_size + PADDING, HIDDEN, generator=generator)
        hidden_NE[:, 0] = 1
        weight_VE[self.vocab_size :, 0] = 50
        return hidden_NE.to(self.dtype), weight_VE.to(self.dtype)

    def ours(self, block_columns: int | None = None, shard: VocabularyShard | None = None, end: int = -1) -> Results:
        """Compute a shard that ends before the column `end`, or all columns."""
        hidden_NE, weight_VE = self.draw()
        if shard is not None:
            weight_VE = weight_VE[shard.first : end].contiguous()
        hidden_NE.requires_grad_(), weight_VE.requires_grad_()
        out = output_log_probs(
            hidden_NE,
            weight_VE,
            self.targets_N,
            shard or VocabularyShard(0, self.vocab_size),
            self.temperature,
            block_columns,
            self.with_entropies,
            BACKEND,
        )
        return self._differentiate(out, hidden_NE, weight_VE)

    def naive(self, dtype: torch.dtype) -> Results:
        hidden_NE, weight_VE = (tensor.to(dtype).requires_grad_() for tensor in self.draw())
        out = naive_log_probs(hidden_NE, weight_VE, self.targets_N, self.vocab_size, self.temperature)
        if self.with_entropies:
            entropies_N = naive_entropies(hidden_NE, weight_VE, self.vocab_size, self.temperature)
            out = torch.stack((out, entropies_N), dim=1)
        return self._differentiate(out, hidden_NE, weight_VE)

    def _differentiate(self, out: torch.Tensor, *leaves: torch.Tensor) -> Results:
        """Run backward from a loss with uneven weights of both signs."""
        places = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape)
        (out * torch.sin(places + 1)).sum().backward()
        return (out.detach(), *(leaf.grad for leaf in leaves))

    def assert_near(self, found: Results) -> None:
        """Check that results are as near to the truth as the naive form's in the same precision."""
        tensors = found, self.naive(self.dtype), self.naive(torch.float64)
        if self.dtype is FP32:
            # Gradients are sums of terms of the size of one, which cancel where a row has two columns.
            tensors = [list(map(beside_one, some)) for some in tensors]
        assert_near(*tensors)
        assert (found[2][self.vocab_size :] == 0).all()


def beside_one(values: torch.Tensor) -> torch.Tensor:
    """Put a one beside the values, so that their error may be as large as that of a one."""
    return torch.cat([values.flatten(), values.new_ones(1)])


@settings(max_examples=15, deadline=None)
@given(
    num_rows=st.integers(1, 20),
    vocab_size=st.integers(1, 70),
    block_columns=st.none() | st.integers(1, 80),
    temperature=st.sampled_from([1.0, 0.7, 1.3]),
    with_entropies=st.booleans(),
)
@example(num_rows=1, vocab_size=2, block_columns=1, temperature=0.7, with_entropies=True)
def test_any_rows_columns_and_blocks_give_the_naive_results(
    num_rows: int, vocab_size: int, block_columns: int | None, temperature: float, with_entropies: bool
) -> None:
    problem = Problem(num_rows, vocab_size, FP32, temperature, with_entropies)
    problem.assert_near(problem.ours(block_columns))


# The interpreter takes as long for 8 columns as for 32.
@pytest.mark.parametrize(
    ("dtype", "with_entropies", "temperature"),
    [
        pytest.param(*case, marks=[] if case in OFTEN else [pytest.mark.slow])
        for case in itertools.product((BF16, FP16), (False, True), (1.0, 0.7))
    ],
)
def test_the_error_in_half_precision_is_at_most_twice_that_of_the_naive_form(
    dtype: torch.dtype, with_entropies: bool, temperature: float
) -> None:
    problem = Problem(37, 157, dtype, temperature, with_entropies)
    with mock.patch.object(triton_fused, "COLUMNS", 32):
        found = problem.ours(block_columns=75)
    assert [one.dtype for one in found] == [FP32, dtype, dtype]
    problem.assert_near(found)


def test_the_same_numbers_give_the_same_bits_again() -> None:
    problem = Problem(9, 67)
    assert all(torch.equal(one, other) for one, other in zip(problem.ours(40), problem.ours(40), strict=True))


def test_large_logits_of_few_tokens_neither_overflow_nor_lose_the_entropy() -> None:
    problem = Problem(6, 61, scale=2_000.0)
    problem.assert_near(problem.ours(20))


def test_what_is_not_a_number_spoils_its_own_row_alone() -> None:
    problem = Problem(6, 61)
    hidden_NE, weight_VE = problem.draw()
    hidden_NE[2, 1], hidden_NE[4, 1] = float("nan"), float("inf")
    shard = VocabularyShard(0, 61)
    out_N2 = output_log_probs(hidden_NE, weight_VE, problem.targets_N, shard, 0.7, 20, True, BACKEND)
    assert out_N2.isnan().any(dim=1).tolist() == [False, False, True, False, True, False]


def test_a_target_outside_the_vocabulary_has_no_log_prob() -> None:
    problem = Problem(4, 61)
    targets_N = torch.tensor([61, -1, 60, 1_000])
    out_N = output_log_probs(*problem.draw(), targets_N, VocabularyShard(0, 61), 1.0, 20, backend=BACKEND)
    assert out_N.isnan().tolist() == [True, True, False, True]


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_input_leaves_the_others_gradient_unchanged(frozen: int) -> None:
    problem = Problem(5, 61, with_entropies=False)
    expected = problem.ours(20)
    inputs = problem.draw()
    inputs[1 - frozen].requires_grad_()
    out_N = output_log_probs(*inputs, problem.targets_N, VocabularyShard(0, 61), 0.7, 20, backend=BACKEND)
    problem._differentiate(out_N)
    assert inputs[frozen].grad is None
    assert torch.equal(inputs[1 - frozen].grad, expected[2 - frozen])


def test_no_targets_give_no_log_probs_and_gradients_of_zero() -> None:
    problem = Problem(0, 61, with_entropies=False)
    out_N, grad_hidden_NE, grad_weight_VE = problem.ours(20)
    assert (out_N.shape, grad_hidden_NE.shape) == ((0,), (0, HIDDEN))
    assert (grad_weight_VE == 0).all()


class SimulatedShard(VocabularyShard):
    """A shard of a rank whose partners run before and after it.

    A run of all ranks records what each contributes to its reductions. The reductions of the next run sum what was
    recorded, so each run has one reduction more right than the run before.
    """

    given: list[torch.Tensor]
    recorded: list[list[torch.Tensor]]

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        number = len(self.given)
        self.given.append(tensor.clone())
        if not self.recorded:
            return tensor
        parts = torch.stack([of_rank[number] for of_rank in self.recorded])
        return parts.amax(dim=0) if op is dist.ReduceOp.MAX else parts.sum(dim=0)


def run_shards(problem: Problem, bounds: list[int], block_columns: int) -> list[Results]:
    """Compute the shards between the bounds, each as one rank among the others."""
    recorded: list[list[torch.Tensor]] = []
    for _ in range(3):
        results, given = [], []
        for first, end in itertools.pairwise(bounds):
            shard = SimulatedShard(first, problem.vocab_size)
            # The class is frozen.
            vars(shard).update(given=[], recorded=recorded)
            results.append(problem.ours(block_columns, shard, end))
            given.append(shard.given)
        recorded = given
    return results


@pytest.mark.parametrize(("dtype", "bounds"), [(FP32, [0, 32, 64]), (BF16, [0, 32, 64]), (FP32, [0, 16, 61, 64])])
@pytest.mark.parametrize("with_entropies", [False, True])
def test_a_vocabulary_in_shards_gives_the_same_even_where_a_shard_has_only_padding(
    dtype: torch.dtype, bounds: list[int], with_entropies: bool
) -> None:
    problem = Problem(7, 61, dtype, with_entropies=with_entropies)
    results = run_shards(problem, bounds, 20)
    grad_hidden_NE = sum(grad_hidden_NE.float() for _, grad_hidden_NE, _ in results)
    grad_weight_VE = torch.cat([grad_weight_VE for *_, grad_weight_VE in results])
    for out, *_ in results:
        problem.assert_near((out, grad_hidden_NE.to(dtype), grad_weight_VE))
