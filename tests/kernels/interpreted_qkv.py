"""The kernels that split heads against their definition in float64, forward and all gradients.

test_interpreted.py runs this with TRITON_INTERPRET=1.

Letters: T rows, G groups, D dimensions of a head, F pairs that rotate.
"""

import dataclasses
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from megatron_rl.ops.backends import Conditions
from megatron_rl.ops.qkv import BACKENDS, HeadNorms, make_rotation, split_heads, triton_fused
from tests.truth import assert_near

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
EPSILON, FACTOR = 1e-3, 1.3


@pytest.fixture
def _small_programs() -> Iterator[None]:
    """Give programs few rows, so that few rows are divided in every way."""
    with mock.patch.object(triton_fused, "_PAIRS", 32), mock.patch.object(triton_fused, "_TILES", 2):
        yield


@dataclasses.dataclass(frozen=True)
class Problem:
    """Random rows; `rotated` is the number of pairs that rotate, and all are beyond a full turn."""

    num_rows: int
    num_groups: int
    queries: int
    head_dim: int
    rotated: int
    dtype: torch.dtype = FP32
    has_norms: bool = True
    is_zero_centered: bool = False

    def draw(self, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        """Draw the product and the weights of norms; gradients of heads; and angles."""
        generator = torch.Generator().manual_seed(self.num_rows)
        heads = self.num_groups * self.queries, self.num_groups, self.num_groups
        shapes = [(self.num_rows, 1, sum(heads) * self.head_dim), *[(self.head_dim,)] * 2 * self.has_norms]
        drawn = [torch.randn(shape, generator=generator).to(self.dtype).to(dtype) for shape in shapes]
        grads = [torch.randn(self.num_rows, of, self.head_dim, generator=generator) for of in heads]
        angles_TF = 100 * torch.randn(self.num_rows, self.rotated, generator=generator)
        return [one.requires_grad_() for one in drawn], [grad.to(self.dtype).to(dtype) for grad in grads], angles_TF

    def compute(self, name: str = "triton") -> list[torch.Tensor]:
        """Return heads and gradients in this dtype."""
        given, grads, angles_TF = self.draw(self.dtype)
        norms = HeadNorms(given[1], given[2], EPSILON, self.is_zero_centered) if self.has_norms else None
        rotation_T2F = make_rotation(angles_TF, FACTOR) if self.rotated else None
        heads = split_heads(given[0], self.num_groups, self.head_dim, rotation_T2F, norms, name)
        found = torch.autograd.grad(heads, given, grads)
        return [one.detach() for one in (*heads, *found)]

    def define(self) -> list[torch.Tensor]:
        """Compute the same in float64, head by head, in complex numbers."""
        given, grads, angles_TF = self.draw(torch.float64)
        heads = given[0].reshape(self.num_rows, self.num_groups, self.queries + 2, self.head_dim)
        rotation_TF = torch.polar(torch.full_like(angles_TF.double(), FACTOR), angles_TF.double())
        of_kind: list[list[torch.Tensor]] = [[], [], []]
        for group in range(self.num_groups):
            for head in range(self.queries + 2):
                kind = max(0, head - self.queries + 1)
                x_TD = heads[:, group, head]
                if self.has_norms and kind < 2:
                    weight_D = given[1 + kind] + self.is_zero_centered
                    x_TD = x_TD * weight_D / (x_TD.norm(dim=1, keepdim=True) ** 2 / self.head_dim + EPSILON).sqrt()
                if self.rotated and kind < 2:
                    half = self.rotated
                    rotated_TF = torch.complex(x_TD[:, :half], x_TD[:, half : 2 * half]) * rotation_TF
                    x_TD = torch.cat((rotated_TF.real, rotated_TF.imag, x_TD[:, 2 * self.rotated :]), dim=1)
                of_kind[kind].append(x_TD)
        found = [torch.stack(of, dim=1) for of in of_kind]
        return [one.detach() for one in (*found, *torch.autograd.grad(found, given, grads))]

    def assert_near(self) -> None:
        """Check that results are as near to the truth as the naive form's in the same precision."""
        found = self.compute()
        assert all(one.dtype == self.dtype for one in found)
        assert_near(found, self.compute("torch"), self.define())


@pytest.mark.usefixtures("_small_programs")
@pytest.mark.parametrize(
    "problem",
    [
        Problem(1, 1, 1, 2, 1),
        Problem(13, 2, 3, 16, 8),
        # Widths other than powers of two, and heads that rotate in part.
        Problem(9, 2, 1, 24, 12),
        Problem(5, 1, 2, 20, 3, is_zero_centered=True),
        Problem(3, 1, 2, 12, 0),
        Problem(5, 2, 2, 24, 12, has_norms=False),
        Problem(13, 2, 2, 16, 8, BF16),
        Problem(13, 1, 2, 20, 4, FP16),
    ],
)
def test_heads_and_all_gradients_are_those_of_the_definition(problem: Problem) -> None:
    problem.assert_near()


def test_programs_of_the_size_that_runs_give_the_same() -> None:
    Problem(70, 1, 1, 128, 64, BF16).assert_near()


@pytest.mark.usefixtures("_small_programs")
def test_the_same_rows_give_the_same_bits_whatever_rows_follow() -> None:
    problem = Problem(9, 1, 2, 16, 8, BF16)
    first = problem.compute()
    assert all(map(torch.equal, first, problem.compute()))
    (mixed, *weights), _, angles_TF = problem.draw(BF16)
    norms = HeadNorms(*weights, EPSILON)
    some = split_heads(mixed[:5], 1, 16, make_rotation(angles_TF[:5], FACTOR), norms)
    assert all(torch.equal(one, other[:5]) for one, other in zip(some, first, strict=False))


@pytest.mark.usefixtures("_small_programs")
def test_what_is_not_a_number_spoils_its_own_head_of_its_row_alone() -> None:
    (mixed, *weights), grads, angles_TF = Problem(9, 2, 2, 16, 8).draw(FP32)
    with torch.no_grad():
        # The second query head of the second group.
        mixed[5, 0, 5 * 16] = float("nan")
    heads = split_heads(mixed, 2, 16, make_rotation(angles_TF), HeadNorms(*weights, EPSILON))
    (grad,) = torch.autograd.grad(heads, mixed, grads)
    assert heads[0].isnan().any(-1).nonzero().tolist() == [[5, 3]]
    assert not heads[1].isnan().any()
    assert not heads[2].isnan().any()
    assert grad.unflatten(-1, (8, 16)).isnan().any(-1).nonzero().tolist() == [[5, 0, 5]]


def test_no_rows_give_no_heads_and_gradients_of_zero_for_the_norms() -> None:
    *heads, product, q_norm, k_norm = Problem(0, 2, 2, 16, 8).compute()
    assert [len(one) for one in (*heads, product)] == [0] * 4
    assert (torch.stack((q_norm, k_norm)) == 0).all()


@pytest.mark.usefixtures("_small_programs")
def test_gradients_with_other_strides_and_unused_heads_count_as_they_are() -> None:
    (mixed, *weights), _, angles_TF = Problem(9, 2, 2, 16, 8).draw(FP32)
    for name, grads in (found := {"triton": [], "torch": []}).items():
        norms = HeadNorms(*weights, EPSILON)
        q_THD, k_TGD, _ = split_heads(mixed, 2, 16, make_rotation(angles_TF), norms, name)
        # The gradient of queries is expanded, that of keys transposed, and that of values is missing.
        loss = q_THD.sum() + (k_TGD.transpose(0, 1) * torch.arange(16.0)).sum()
        grads.extend(torch.autograd.grad(loss, (mixed, *weights)))
    for ours, theirs in zip(found["triton"], found["torch"], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_without_norms_the_product_is_not_kept_for_the_backward_pass() -> None:
    for has_norms in (False, True):
        given, _, angles_TF = Problem(3, 1, 1, 8, 4, has_norms=has_norms).draw(FP32)
        norms = HeadNorms(given[1], given[2], EPSILON) if has_norms else None
        q_T1HD, *_ = split_heads(given[0], 1, 8, make_rotation(angles_TF), norms)
        kept = [one for one in q_T1HD.grad_fn.saved_tensors if one is not None]
        assert any(one.numel() == given[0].numel() for one in kept) is has_norms


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_kernels_pass_their_trial(dtype: torch.dtype) -> None:
    BACKENDS.check("triton", Conditions("cpu", dtype, head_dim=64))
