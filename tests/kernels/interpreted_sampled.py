"""The kernel that scores sampled tokens; test_interpreted.py runs this with TRITON_INTERPRET=1."""

import pytest
import torch

from megatron_rl.ops import sampled
from megatron_rl.ops.sampled import score_naively, triton_kernels
from tests.truth import error_over_bound

# A number far above the least one overflows, as it may.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
BLOCK = triton_kernels.NUM_COLUMNS


def draw(num_rows: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_columns)
    return (5 * torch.randn(num_rows, num_columns, generator=generator)).to(dtype)


def check(logits_RV: torch.Tensor, chosen_R: torch.Tensor) -> sampled.Scores:
    """Score, and hold the result against the naive twin's and the truth."""
    found = sampled.score(logits_RV, chosen_R)
    plain, truth = score_naively(logits_RV, chosen_R), score_naively(logits_RV.double(), chosen_R)
    assert found.log_probs_R.dtype == FP32
    assert error_over_bound(found.log_probs_R, plain.log_probs_R, truth.log_probs_R) <= 1
    assert torch.equal(found.ranks_R, truth.ranks_R)
    return found


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("num_columns", [1, 2, 131, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 77, 20011])
def test_vocabularies_of_all_sizes_are_scored_as_the_definition_does(num_columns: int, dtype: torch.dtype) -> None:
    logits_RV = draw(4, num_columns, dtype)
    for chosen_R in (
        torch.zeros(4, dtype=torch.int64),
        torch.full((4,), num_columns - 1),
        logits_RV.argmax(-1),
        torch.arange(4) * num_columns // 4,
    ):
        found = check(logits_RV, chosen_R)
        assert (found.log_probs_R <= 0).all()
    assert (check(logits_RV, logits_RV.argmax(-1)).ranks_R >= 1).all()


def test_rows_may_lie_apart_and_no_row_is_allowed_too() -> None:
    wide = draw(6, 500, BF16)
    wide[:, 300:] = torch.inf
    check(wide[::2, :300], torch.tensor([3, 299, 0]))
    assert sampled.score(wide[:0, :300], torch.zeros(0, dtype=torch.int64)).log_probs_R.shape == (0,)


def test_columns_that_are_masked_have_no_part_in_the_sum() -> None:
    logits_RV = draw(3, BLOCK + 9, FP32)
    logits_RV[:, 5:] = -torch.inf
    logits_RV[1] = -torch.inf
    logits_RV[1, BLOCK + 3] = 2.5
    found = check(logits_RV[:2], torch.tensor([4, BLOCK + 3]))
    assert found.log_probs_R[1] == 0
    assert found.ranks_R[1] == 1


@pytest.mark.parametrize("values", [[1e38, -1e38, 1e38], [-3e38, -3e38, -3e38], [88.0, 0.0, -104.0], [0.0, -0.0, 0.0]])
def test_extreme_and_equal_numbers_neither_overflow_nor_vanish(values: list[float]) -> None:
    logits_RV = torch.tensor([values, values[::-1]])
    for column in range(3):
        check(logits_RV, torch.tensor([column, column]))


def test_a_masked_column_that_is_chosen_is_behind_all_columns() -> None:
    logits_RV = draw(1, 131, FP32)
    logits_RV[0, 7] = -torch.inf
    found = sampled.score(logits_RV, torch.tensor([7]))
    assert (found.log_probs_R.item(), found.ranks_R.item()) == (-torch.inf, 131)


def test_what_is_not_a_number_is_not_hidden() -> None:
    logits_RV = draw(2, 40, FP32)
    logits_RV[0, 17] = torch.nan
    found = sampled.score(logits_RV, torch.tensor([3, 3]))
    assert found.log_probs_R.isnan().tolist() == [True, False]


def test_equal_rows_have_equal_bits_in_any_batch() -> None:
    logits_RV = draw(5, 20011, BF16)
    chosen_R = torch.arange(5) * 4000
    together = sampled.score(logits_RV, chosen_R)
    for row in range(5):
        alone = sampled.score(logits_RV[row : row + 1], chosen_R[row : row + 1])
        assert torch.equal(alone.log_probs_R, together.log_probs_R[row : row + 1])


def test_a_trial_passes_the_kernel_and_finds_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    host = torch.device("cpu")
    assert sampled.try_kernel(host, BF16) is None
    assert sampled.try_kernel(host, FP32) is None
    true = sampled.score

    def off(scale: float, added: int):
        def score(logits_RV, chosen_R):
            found = true(logits_RV, chosen_R)
            return sampled.Scores(found.log_probs_R * scale, found.ranks_R + added)

        return score

    for faulty, said in (
        (off(1 + 1e-5, 0), "the log-prob is off by"),
        (off(torch.nan, 0), "the log-prob is off by nan"),
        (off(1, 1), "the rank is off by"),
        (lambda *_: 1 / 0, "it fails with ZeroDivisionError"),
    ):
        monkeypatch.setattr(sampled, "score", faulty)
        fault = sampled.try_kernel(host, FP32)
        assert fault is not None
        assert fault.startswith(said)


def test_a_trial_compiles_the_kernel_for_rows_of_any_length_and_for_multiples_of_16(monkeypatch) -> None:
    lengths, score = [], sampled.score

    def noted(logits_RV: torch.Tensor, chosen_R: torch.Tensor) -> sampled.Scores:
        lengths.append(logits_RV.stride(0))
        return score(logits_RV, chosen_R)

    monkeypatch.setattr(sampled, "score", noted)
    assert sampled.try_kernel(torch.device("cpu"), BF16) is None
    assert {length % 16 == 0 for length in lengths} == {True, False}
