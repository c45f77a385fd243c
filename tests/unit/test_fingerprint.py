"""The digest of a tensor: of its bits alone, however it is sliced."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.errors import InputError
from megatron_rl.weights.fingerprint import NUM_LANES, checksum, digest, fingerprint
from megatron_rl.weights.mapping import TensorSpec
from megatron_rl.weights.shards import Digests

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from(DTYPES), st.data())
def test_the_digests_of_slices_add_up_to_the_whole(rows: int, columns: int, dtype: torch.dtype, data) -> None:
    whole = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns)).to(dtype)
    row, column = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    parts = [
        digest(whole[r, c], r.start, c.start)
        for r in (slice(0, row), slice(row, rows))
        for c in (slice(0, column), slice(column, columns))
        if whole[r, c].numel()
    ]
    assert torch.equal(torch.stack(parts).sum(0), digest(whole))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8, torch.float64])
def test_whole_words_and_single_elements_count_alike(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    whole = (100 * torch.randn(12, 40)).to(dtype)
    spread = torch.zeros(12, 80, dtype=dtype)[:, ::2].copy_(whole)
    assert torch.equal(digest(spread), digest(whole))
    odd = [digest(whole[:, start:stop], 0, start) for start, stop in ((0, 3), (3, 8), (8, 40))]
    assert torch.equal(torch.stack(odd).sum(0), digest(whole))


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_one_bit_changes_every_lane(dtype: torch.dtype) -> None:
    original = torch.randn(6, 5).to(dtype)
    before = digest(original)
    for element in range(original.numel()):
        for bit in range(8 * original.element_size()):
            changed = original.clone()
            bits = changed.view(torch.uint8).view(-1)
            bits[element * original.element_size() + bit // 8] ^= 1 << (bit % 8)
            assert (digest(changed) != before).all()


def test_faults_that_sums_often_miss_are_seen() -> None:
    torch.manual_seed(0)
    original = torch.randn(64, 64)
    swapped_rows, swapped_columns = original.clone(), original.clone()
    swapped_rows[[3, 9]] = original[[9, 3]]
    swapped_columns[:, [3, 9]] = original[:, [9, 3]]
    faults = [swapped_rows, swapped_columns, -original, original.T.contiguous(), original.roll(1), original.flip(0)]
    digests = {tuple(digest(tensor).tolist()) for tensor in (original, *faults)}
    assert len(digests) == len(faults) + 1


def test_vectors_and_large_rows_are_digested_in_blocks_without_a_difference() -> None:
    vector, wide = torch.randn(1000), torch.randn(3, 300_000)
    assert torch.equal(digest(vector), digest(vector[:300]) + digest(vector[300:], 300))
    assert torch.equal(digest(wide), digest(wide[:1]) + digest(wide[1:], 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (64, 1024), (3, 33, 129)])
def test_a_checksum_tells_any_one_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    before = checksum(tensor)
    assert torch.equal(before, checksum(tensor.clone()))
    bytes_B = tensor.view(-1).view(torch.uint8)
    for place in {0, bytes_B.numel() // 2, bytes_B.numel() - 1}:
        for bit in (1, 128):
            bytes_B[place] ^= bit
            assert not torch.equal(checksum(tensor), before)
            bytes_B[place] ^= bit
    assert torch.equal(checksum(tensor), before)


def test_a_checksum_tells_small_updates_that_add_up_to_nothing() -> None:
    """Elements exchanged, and as many steps up as down, anywhere in the tensor."""
    tensor = torch.randn(64, 1024).to(torch.bfloat16)
    before, bits = checksum(tensor), tensor.view(-1).view(torch.int16)
    for seed in range(100):
        up, down, *others = torch.randperm(bits.numel(), generator=torch.Generator().manual_seed(seed))[:6].tolist()
        changed = tensor.clone().view(-1).view(torch.int16)
        changed[up] += 1
        changed[down] -= 1
        changed[others] = changed[others[::-1]]
        assert not torch.equal(checksum(changed.view(torch.bfloat16).view_as(tensor)), before)


def test_a_checksum_is_of_the_elements_wherever_they_lie() -> None:
    tensor = torch.randn(40, 1025).to(torch.bfloat16)
    part = tensor.view(-1)[3 : 3 + 1024 * 9]
    assert torch.equal(checksum(part), checksum(part.clone()))
    assert torch.equal(checksum(tensor[:, :5]), checksum(tensor[:, :5].clone()))


def test_the_fingerprint_depends_on_names_shapes_and_dtypes_and_not_on_order() -> None:
    specs = [TensorSpec("a", (2, 3), "float32"), TensorSpec("b", (6,), "float32")]
    digests = {"a": [1, 2], "b": [3, -4]}
    value = fingerprint(specs, digests)
    assert value == fingerprint(reversed(specs), digests)
    for changed in (
        [TensorSpec("a", (3, 2), "float32"), specs[1]],
        [TensorSpec("a", (2, 3), "bfloat16"), specs[1]],
    ):
        assert fingerprint(changed, digests) != value
    assert fingerprint(specs, {"a": [3, -4], "b": [1, 2]}) != value


def test_a_slice_left_out_or_counted_twice_is_an_error_that_names_the_tensor() -> None:
    for blocks in ((slice(0, 3),), (slice(0, 4), slice(3, 4))):
        digests = Digests([TensorSpec("model.norm.weight", (4, 2), "float32")])
        values = torch.ones(4, 2)
        for block in blocks:
            digests.add("model.norm.weight", block.start, 0, values[block])
        with pytest.raises(InputError, match=r"model\.norm\.weight has 8 elements"):
            digests.combine()
    assert NUM_LANES == 2
