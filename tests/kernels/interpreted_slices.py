"""The kernels over slices against their naive twins, bit for bit; test_interpreted.py runs this, interpreted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.ops.slices import (
    Move,
    Placed,
    Slice,
    build_slice_mover,
    list_reasons_against_kernels,
    naive,
    triton_fused,
)
from megatron_rl.ops.slices.naive import NUM_LANES, digest

# Numbers that fp16 cannot hold become infinite, in numpy with a warning.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CONVERSIONS = [(FP32, FP32), (BF16, BF16), (FP16, FP16), (FP32, BF16), (FP32, FP16), (BF16, FP32), (BF16, FP16),
               (FP16, FP32), (FP16, BF16), (torch.float64, torch.float64)]  # fmt: skip
# Numbers at which rounding goes wrong first: ties to even on both sides, subnormal, infinite and the largest ones.
EDGES = [0.0, -0.0, 1.00390625, 1.01171875, 1e-40, -3e-39, 6e-8, -2.9e-8, 65504.0, 65520.0, 3.4e38, float("inf")]


def draw(num_rows: int, num_columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_rows, num_columns, generator=generator) * 10 ** torch.randn(1, generator=generator)
    flat = values.view(-1)
    flat[: len(EDGES)] = torch.tensor(EDGES)[: len(flat)]
    return values.to(dtype)


def digest_all(slices: list[Slice], dtype: torch.dtype, num_tensors: int) -> torch.Tensor:
    """Digest with the kernel, and check that the naive twin gives the same."""
    assert not list_reasons_against_kernels(slices, dtype)
    found = triton_fused.KernelDigester(slices, dtype, num_tensors).digest()
    assert torch.equal(found, naive.NaiveDigester(slices, dtype, num_tensors).digest())
    return found


@pytest.mark.parametrize(("source", "target"), CONVERSIONS)
def test_slices_of_all_shapes_and_strides_have_the_digests_of_the_definition(source, target) -> None:
    wide, odd = draw(33, 600, source), draw(11, 37, source)
    vector, empty = draw(1, 300, source).view(-1, 1), draw(0, 8, source)
    slices = [
        Slice(wide, 0),
        Slice(wide[3:20, 8:520], 1, 5, 16),
        Slice(wide[:, 3:290], 1, 40, 1),
        Slice(odd, 2),
        Slice(odd[2:9:3, 5:30], 3, 7, 3),
        Slice(wide[:9, ::2], 4, 1, 2),
        Slice(vector, 5, 1000),
        Slice(empty, 6),
    ]
    found = digest_all(slices, target, 8)
    assert torch.equal(found[0], digest(wide.to(target)))
    assert (found[:6] != 0).all()
    assert (found[6:] == 0).all()


@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(1, 20), st.integers(1, 40), st.sampled_from(CONVERSIONS))
def test_the_digests_of_any_slices_that_cover_a_tensor_add_up(data, rows, columns, conversion) -> None:
    source, target = conversion
    whole = draw(rows, columns, source, seed=rows * columns)
    row, column = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    parts = [
        Slice(whole[r, c], 0, r.start, c.start)
        for r in (slice(0, row), slice(row, rows))
        for c in (slice(0, column), slice(column, columns))
    ]
    assert torch.equal(digest_all(parts, target, 1)[0], digest(whole.to(target)))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_a_changed_bit_swapped_numbers_and_a_moved_row_are_found(dtype) -> None:
    original = draw(40, 64, dtype)
    changed, swapped, moved = original.clone(), original.clone(), original.clone()
    changed.view(torch.uint8)[17, 5] ^= 1
    swapped[20, [3, 60]] = original[20, [60, 3]]
    moved[[7, 31]] = original[[31, 7]]
    tensors = [original, changed, swapped, moved, original.roll(1, 1), -original]
    found = digest_all([Slice(values, i) for i, values in enumerate(tensors)], dtype, len(tensors))
    for lane in range(NUM_LANES):
        assert len(set(found[:, lane].tolist())) == len(tensors)


def test_a_digester_sees_numbers_that_change_in_place() -> None:
    values = draw(16, 32, BF16)
    digester = triton_fused.KernelDigester([Slice(values, 0)], BF16, 1)
    before = digester.digest()
    values[3, 3] += 1
    assert torch.equal(digester.digest()[0], digest(values))
    assert not torch.equal(digester.digest(), before)


@pytest.mark.parametrize(("source", "target"), CONVERSIONS)
def test_packed_slices_lie_where_they_are_placed_and_nothing_else_is_written(source, target) -> None:
    wide, odd, vector = draw(33, 600, source), draw(11, 37, source), draw(1, 301, source).view(-1, 1)
    batches = []
    for values in ([wide[1:19], odd, vector], [odd[:, 3:9], wide[:, 8:520], wide[2:4, ::3], wide[:0]]):
        batch, place = [], 8
        for one in values:
            batch.append(Placed(one, place))
            place += one.numel() * target.itemsize
        batches.append(batch)
    packer, twin = triton_fused.KernelPacker(batches, target), naive.NaivePacker(batches, target)
    for number, batch in enumerate(batches):
        end = 8 + sum(one.values_RC.numel() for one in batch) * target.itemsize
        found, expected = (torch.full((end + 64,), 0xEE, dtype=torch.uint8) for _ in range(2))
        packer.pack(number, found)
        twin.pack(number, expected)
        assert torch.equal(found, expected)
        assert (found[:8] == 0xEE).all()
        assert (found[end:] == 0xEE).all()
        assert torch.equal(found[8:end].view(target), torch.cat([o.values_RC.reshape(-1).to(target) for o in batch]))


@pytest.mark.parametrize(("source", "target"), CONVERSIONS)
def test_moved_slices_lie_in_their_places_and_nothing_else_is_written(source, target) -> None:
    wide, odd, vector = draw(33, 600, source), draw(11, 37, source), draw(1, 301, source).view(-1, 1)
    places = [
        (wide, (40, 640), (4, 8)),
        (wide[1:19, 8:520], (18, 512), (0, 0)),
        (odd[:, 3:9], (30, 13), (7, 5)),
        (wide[2:4, ::3], (3, 201), (1, 1)),
        (vector, (400, 1), (2, 0)),
        (odd[:0], (5, 37), (1, 0)),
    ]
    found = [torch.full(shape, 7, dtype=target) for _, shape, _ in places]
    expected = [whole.clone() for whole in found]
    moves = []
    for (values, _, (row, column)), whole, wanted in zip(places, found, expected, strict=True):
        rows, columns = slice(row, row + values.shape[0]), slice(column, column + values.shape[1])
        moves.append(Move(values, whole[rows, columns]))
        wanted[rows, columns] = values.to(target)
    mover = build_slice_mover(moves)
    assert isinstance(mover, triton_fused.KernelMover)
    assert len(mover._launches) <= 5
    mover.move()
    for one, wanted in zip(found, expected, strict=True):
        assert torch.equal(one.view(torch.uint8), wanted.view(torch.uint8))


def test_places_that_are_not_of_one_piece_a_row_are_left_to_the_twin() -> None:
    place = torch.zeros(4, 6)
    mover = build_slice_mover([Move(torch.ones(4, 3), place[:, ::2])])
    assert isinstance(mover, naive.NaiveMover)
    mover.move()
    assert place.sum() == 12


def test_what_is_not_a_number_stays_so() -> None:
    values = torch.tensor([[float("nan"), -float("nan"), 1.0]])
    values.view(torch.int32)[0, 0] = 0x7F800001
    buffer = torch.zeros(6, dtype=torch.uint8)
    triton_fused.KernelPacker([[Placed(values, 0)]], BF16).pack(0, buffer)
    assert buffer.view(BF16).isnan().tolist() == [True, True, False]
