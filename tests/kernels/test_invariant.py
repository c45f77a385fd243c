"""Batch-invariant operations: the same bits in every batch, and the right numbers.

Letters: N rows, I inputs, O outputs, F pairs, E hidden size, V vocabulary, H heads, D head dimension.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_rl.errors import PlatformError
from megatron_rl.ops.invariant import attention, bit_equality, gradients, rows
from megatron_rl.ops.log_probs import VocabularyShard, invariant, output_log_probs
from megatron_rl.ops.shared_prompt import BACKENDS
from megatron_rl.ops.shared_prompt.layout import ROOT, Layout
from tests.kernels.drawn_layouts import layouts
from tests.kernels.shared_prompt_cases import BRANCHED, NAMES, RAGGED, Case
from tests.naive_log_probs import naive_log_probs
from tests.truth import error_over_bound, worst_of

DTYPES = [torch.float32, torch.bfloat16]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def threads() -> Iterator[None]:
    present = torch.get_num_threads()
    yield
    torch.set_num_threads(present)


@pytest.mark.usefixtures("threads")
@settings(max_examples=25, deadline=None)
@given(
    num_rows=st.integers(1, 3 * rows.NUM_ROWS),
    sizes=st.tuples(*[st.sampled_from([5, 32, 100, 128, 384])] * 2),
    dtype=st.sampled_from(DTYPES),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
@example(num_rows=90, sizes=(33, 5), dtype=torch.float32, num_threads=1, seed=0)
def test_a_row_has_the_same_bits_in_every_batch(
    num_rows: int, sizes: tuple[int, int], dtype: torch.dtype, num_threads: int, seed: int
) -> None:
    num_inputs, num_outputs = sizes
    rows_NI, weight_OI = draw(100, num_inputs, dtype=dtype), draw(num_outputs, num_inputs, dtype=dtype, seed=1)
    torch.set_num_threads(1)
    weight_I, angles_NF = weight_OI[0], draw(100, 16)

    def compute(chosen_N: torch.Tensor) -> list[torch.Tensor]:
        some = rows_NI[chosen_N]
        cosines_NF, sines_NF = rows.turn(chosen_N, angles_NF[0].abs())
        heads = some[:, None, :32].expand(-1, 3, -1) if num_inputs >= 32 else some[:, None, :0]
        return [
            rows.multiply(some, weight_OI),
            rows.normalize(some, weight_I, 1e-6),
            rows.swiglu(torch.cat((some, some), dim=1)),
            rows.rotate(heads, cosines_NF[:, : heads.shape[2] // 2], sines_NF[:, : heads.shape[2] // 2]),
            invariant.log_softmax(some.float()),
            output_log_probs(some, weight_OI, chosen_N % num_outputs, VocabularyShard(0, num_outputs), 0.7,
                             backend="invariant"),
        ]  # fmt: skip

    whole = compute(torch.arange(100))
    torch.set_num_threads(num_threads)
    chosen_N = torch.randperm(100, generator=torch.Generator().manual_seed(seed))[:num_rows]
    for part, other in zip(compute(chosen_N), whole, strict=True):
        assert torch.equal(part, other[chosen_N])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_and_their_gradients_are_as_near_to_the_truth_as_torchs(dtype: torch.dtype) -> None:
    hidden, weight_E = draw(40, 3, 96, dtype=dtype), draw(96, dtype=dtype, seed=1)
    grad, grad_of_half = draw(40, 3, 96, dtype=dtype, seed=2), draw(40, 3, 48, dtype=dtype, seed=3)

    def normalize(hidden: torch.Tensor, weight_E: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, (96,), weight_E, 1e-3)

    def activate(hidden: torch.Tensor, weight_E: torch.Tensor) -> torch.Tensor:
        gate, up = (hidden * weight_E).chunk(2, dim=-1)
        return F.silu(gate) * up

    for ours, plain, given_grad in (
        (lambda hidden, weight_E: gradients.normalize(hidden, weight_E, 1e-3), normalize, grad),
        (lambda hidden, weight_E: gradients.swiglu(hidden * weight_E), activate, grad_of_half),
    ):
        found = []
        for compute, kind in ((ours, dtype), (plain, dtype), (plain, torch.float64)):
            inputs = [one.to(kind).requires_grad_() for one in (hidden, weight_E)]
            out = compute(*inputs)
            found.append([out.detach(), *torch.autograd.grad(out, inputs, given_grad.to(kind))])
        for tensors in zip(*found, strict=True):
            assert error_over_bound(*tensors) <= 1


def test_angles_are_those_of_positions() -> None:
    frequencies_F, positions_N = 1e4 ** -(torch.arange(16) / 16), torch.tensor([0, 7, 40_000])
    truth = torch.polar(
        torch.ones(3, 16, dtype=torch.float64), torch.outer(positions_N.double(), frequencies_F.double())
    )
    turned = torch.complex(*(one.double() for one in rows.turn(positions_N, frequencies_F)))
    assert (turned - truth).abs().max() < 1e-7
    heads_NHD = draw(3, 2, 36)
    rotated_NHD = rows.rotate(heads_NHD, *rows.turn(positions_N, frequencies_F))
    pairs = torch.complex(heads_NHD[..., :16].double(), heads_NHD[..., 16:32].double()) * truth[:, None]
    assert torch.allclose(rotated_NHD.double(), torch.cat((pairs.real, pairs.imag, heads_NHD[..., 32:]), -1), atol=1e-6)


def make_prefix_layout(layout: Layout, segment: int) -> tuple[Layout, torch.Tensor]:
    """Return the path to a segment as a sequence alone, and its rows in the whole layout."""
    path = [segment]
    while layout.parents[path[0]] != ROOT:
        path.insert(0, layout.parents[path[0]])
    places = torch.cat([torch.arange(layout.starts[one], layout.starts[one + 1]) for one in path])
    return Layout((len(places),), (ROOT,)), places


@settings(max_examples=30, deadline=None)
@given(layout=layouts(longest=90), heads=st.sampled_from([(4, 2), (3, 1)]), dtype=st.sampled_from(DTYPES))
def test_a_shared_pack_has_the_bits_of_each_sequence_alone(
    layout: Layout, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    case, attend = Case.draw(layout, heads, 32, dtype), BACKENDS.find("invariant").attention
    whole = attend(case.q_THD, case.k_TGD, case.v_TGD, layout, case.scale)
    for segment in range(layout.num_segments):
        alone, places = make_prefix_layout(layout, segment)
        inputs = (one[places] for one in (case.q_THD, case.k_TGD, case.v_TGD))
        assert torch.equal(attend(*inputs, alone, case.scale), whole[places])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_and_its_gradients_are_as_near_to_the_truth_as_the_definition(dtype: torch.dtype) -> None:
    for layout in (RAGGED, BRANCHED):
        case, attend = Case.draw(layout, (4, 2), 32, dtype), BACKENDS.find("invariant").attention
        if dtype == torch.bfloat16:
            case.assert_near(attend)
            continue
        found = case.run(attend), case.run(BACKENDS["naive"].attention), case.exact()
        error, tensor = worst_of(*(dict(zip(NAMES, tensors, strict=False)) for tensors in found))
        assert error <= 1, tensor


def test_log_probs_are_as_near_to_the_truth_as_the_definition() -> None:
    hidden_NE, weight_VE = draw(50, 64), draw(invariant.BLOCK_COLUMNS + 900, 64, seed=1) / 8
    vocab_size = len(weight_VE) - 7
    targets_N = torch.arange(50) * 99 % vocab_size
    found = output_log_probs(hidden_NE, weight_VE, targets_N, VocabularyShard(0, vocab_size), 0.7, backend="invariant")
    plain, truth = (
        naive_log_probs(hidden_NE.to(kind), weight_VE.to(kind), targets_N, vocab_size, 0.7)
        for kind in (torch.float32, torch.float64)
    )
    assert error_over_bound(found, plain, truth) <= 1


def test_the_sampler_of_an_engine_has_the_bits_of_the_trainers_output_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant, "BLOCK_COLUMNS", 64)
    # Rounding of the logarithm hides another order of sums in most rows.
    hidden_NE, weight_VE = draw(2000, 32), draw(500, 32, seed=1) / 8
    targets_N = torch.arange(2000) % 490
    found = output_log_probs(hidden_NE, weight_VE, targets_N, VocabularyShard(0, 490), 0.7, backend="invariant")
    scaled_NV = invariant.multiply_in_blocks(hidden_NE, weight_VE[:490]) / 0.7
    assert torch.equal(invariant.log_softmax(scaled_NV)[torch.arange(2000), targets_N], found)


def test_the_trial_passes_here() -> None:
    bit_equality.check_operations([(64, 96), (96, 64)], 2, 32, torch.float32)


@pytest.mark.parametrize("what", ["product", "norm", "SwiGLU", "attention"])
def test_the_trial_names_an_operation_that_depends_on_the_batch(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"product": (rows, "multiply"), "norm": (rows, "normalize"), "SwiGLU": (rows, "swiglu"),
              "attention": (bit_equality, "attend")}  # fmt: skip
    module, name = places[what]
    given_one = getattr(module, name)

    def depend(*arguments):  # type: ignore[no-untyped-def]
        out = given_one(*arguments)
        return (out[0] + len(out[0]), out[1]) if what == "attention" else out + len(out)

    monkeypatch.setattr(module, name, depend)
    with pytest.raises(PlatformError, match=what):
        bit_equality.check_operations([(64, 96)], 2, 32, torch.float32)


def test_few_numbers_at_a_time_do_not_change_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    case, attend = Case.draw(RAGGED, (4, 2), 32, torch.float32), BACKENDS.find("invariant").attention
    inputs = case.q_THD, case.k_TGD, case.v_TGD
    whole = attend(*inputs, RAGGED, case.scale)
    monkeypatch.setattr(attention, "_MOST_ELEMENTS", 1)
    assert torch.equal(attend(*inputs, RAGGED, case.scale), whole)
