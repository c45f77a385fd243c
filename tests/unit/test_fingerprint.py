"""The digest of a tensor depends on its bits alone, however it is sliced."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.errors import InputError
from megatron_rl.ops.slices import naive
from megatron_rl.shared.weights import fingerprint, shards
from megatron_rl.shared.weights.fingerprint import NUM_LANES, compute_fingerprint, digest, digests_by_row
from megatron_rl.shared.weights.mapping import Piece, ShardMap, TensorSpec
from megatron_rl.shared.weights.shards import Digests, Shard, export

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


def test_swapped_transposed_and_moved_numbers_change_the_digest() -> None:
    torch.manual_seed(0)
    original = torch.randn(64, 64)
    swapped_rows, swapped_columns = original.clone(), original.clone()
    swapped_rows[[3, 9]] = original[[9, 3]]
    swapped_columns[:, [3, 9]] = original[:, [9, 3]]
    faults = [swapped_rows, swapped_columns, -original, original.T.contiguous(), original.roll(1), original.flip(0)]
    digests = {tuple(digest(tensor).tolist()) for tensor in (original, *faults)}
    assert len(digests) == len(faults) + 1


def test_digesting_vectors_and_large_rows_in_blocks_changes_no_digest() -> None:
    vector, wide = torch.randn(1000), torch.randn(3, 300_000)
    assert torch.equal(digest(vector), digest(vector[:300]) + digest(vector[300:], 300))
    assert torch.equal(digest(wide), digest(wide[:1]) + digest(wide[1:], 1))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), min_size=1, max_size=6), st.integers(0, 5), st.data())
def test_stacked_slices_have_the_digests_of_each_alone(parts: list[tuple[int, int]], column: int, data) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    slices = [torch.randn(count, 7).to(dtype) for _, count in parts]
    padding = torch.zeros(3, 7, dtype=dtype)
    rows = [torch.arange(first, first + count) for first, count in parts]
    numbers = [torch.full((count,), number) for number, (_, count) in enumerate(parts)]
    found = digests_by_row(
        torch.cat([*slices, padding]),
        column,
        torch.cat([*rows, torch.zeros(3, dtype=torch.int64)]),
        max(first + count for first, count in parts),
        torch.cat([*numbers, torch.full((3,), len(parts))]),
        len(parts),
    )
    alone = [digest(part, first, column) for part, (first, _) in zip(slices, parts, strict=True)]
    assert torch.equal(found, torch.stack(alone))


def test_the_fingerprint_depends_on_names_shapes_and_dtypes_and_not_on_order() -> None:
    specs = [TensorSpec("a", (2, 3), "float32"), TensorSpec("b", (6,), "float32")]
    digests = {"a": [1, 2], "b": [3, -4]}
    value = compute_fingerprint(specs, digests)
    assert value == compute_fingerprint(reversed(specs), digests)
    for changed in (
        [TensorSpec("a", (3, 2), "float32"), specs[1]],
        [TensorSpec("a", (2, 3), "bfloat16"), specs[1]],
    ):
        assert compute_fingerprint(changed, digests) != value
    assert compute_fingerprint(specs, {"a": [3, -4], "b": [1, 2]}) != value
    assert len({value, *(compute_fingerprint(specs, digests, base) for base in ("one", "two"))}) == 3


ROWS = ShardMap((10, 6), (Piece("q", 0, 4, 0, 3), Piece("k", 0, 2, 3, 2), Piece("q", 0, 7, 5, 3)), owned=True)
COLUMNS = ShardMap((4, 6), (Piece("q", 1, 6, 0, 3), Piece("k", 1, 3, 3, 3)), owned=True)
PADDED = ShardMap((8, 6), (Piece("q", 0, 4, 0, 7),), owned=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard_map", [ROWS, COLUMNS, PADDED])
def test_the_pieces_of_a_parameter_are_digested_as_the_slices_that_they_are(
    shard_map: ShardMap, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(shard_map.shape)
    shard = Shard("layer.weight", values, shard_map)
    # Copies of two rows at a time, and the last rows of the maps of rows are padding.
    monkeypatch.setattr(shards, "_BLOCK_ELEMENTS_CPU", 12)
    exported = values.to(fingerprint.DTYPES[dtype])
    places = [(p.source, 0) if p.dim == 0 else (0, p.source) for p in shard_map.pieces]
    expected = [
        digest(exported.narrow(piece.dim, piece.target, piece.length), *place)
        for piece, place in zip(shard_map.pieces, places, strict=True)
    ]
    assert torch.equal(shard.digest_pieces(fingerprint.DTYPES[dtype]), torch.stack(expected))
    of_blocks, of_shard = (Digests([TensorSpec(name, (16, 9), dtype) for name in ("q", "k")]) for _ in range(2))
    export([shard], of_blocks.specs, [of_blocks.add])
    of_shard.add_shards([shard])
    assert torch.equal(of_blocks._sums, of_shard._sums)


def test_a_parameter_of_many_pieces_is_digested_in_one_pass() -> None:
    pieces = tuple(Piece("qkv"[i % 3], 0, i // 3, i, 1) for i in range(300))
    shard = Shard("qkv.weight", torch.randn(300, 8), ShardMap((300, 8), pieces, owned=True))
    digests = Digests([TensorSpec(name, (100, 8), "float32") for name in "qkv"])
    with mock.patch.object(torch, "mv", wraps=torch.mv) as products:
        digests.add_shards([shard])
    assert products.call_count == 1
    assert digests.combine().keys() == {"q", "k", "v"}


@pytest.mark.parametrize("most", [1, 20, 1 << 20])
def test_slices_that_are_digested_together_have_the_digests_that_they_have_alone(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(naive, "_MOST_STACKED", most)
    torch.manual_seed(0)
    wide = torch.randn(6, 9)
    slices = [
        (torch.randn(4, 8), 0, 0), (torch.randn(4, 8), 0, 0), (torch.randn(4, 8), 2, 0), (torch.randn(4, 8), 0, 4),
        (torch.randn(4, 8).bfloat16(), 0, 0), (torch.randn(7), 1, 0), (torch.randn(7), 1, 0), (wide[:4, 1:9], 0, 0),
        (torch.randn(3, 2, 5), 0, 0), (torch.randn(3, 2, 5), 0, 0), (wide.T[:5], 3, 0),
    ]  # fmt: skip
    assert torch.equal(naive.digest_each(slices), torch.stack([digest(*one) for one in slices]))
    assert naive.digest_each([]).shape == (0, NUM_LANES)


def test_small_parameters_are_digested_in_a_few_passes() -> None:
    shapes = [(8, 16), (32, 8)] * 20 + [(16, 8), (400, 400)]
    parts = [
        Shard(f"{i}", torch.randn(s), ShardMap(s, (Piece(f"{i}", 0, 0, 0, s[0]),), True)) for i, s in enumerate(shapes)
    ]
    specs = [TensorSpec(shard.parameter_name, shard.map.shape, "float32") for shard in parts]
    together, alone = Digests(specs), Digests(specs)
    with mock.patch.object(torch, "mv", wraps=torch.mv) as products:
        together.add_shards(parts)
    assert products.call_count == 4
    export(parts, specs, [alone.add])
    assert together.combine() == alone.combine()


def test_a_slice_left_out_or_counted_twice_is_an_error_that_names_the_tensor() -> None:
    for blocks in ((slice(0, 3),), (slice(0, 4), slice(3, 4))):
        digests = Digests([TensorSpec("model.norm.weight", (4, 2), "float32")])
        values = torch.ones(4, 2)
        for block in blocks:
            digests.add("model.norm.weight", block.start, 0, values[block])
        with pytest.raises(InputError, match=r"model\.norm\.weight has 8 elements"):
            digests.combine()
    assert NUM_LANES == 2
