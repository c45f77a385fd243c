"""The digest of a tensor, in torch's operations: the definition that every kernel must equal bit for bit.

A digest is a multilinear hash of 64-bit words. Each row is read as such words, the last one padded with zeros, and

    digest = sum over rows of  r[row] * (sum over words of  c[word] * w)   modulo 2**64

for fixed odd pseudo-random 64-bit numbers r and c; two choices of r give two lanes. An element x fills some bits of its
word, s bits from the right. So it contributes c[word] * 2**s * x on its own, wherever a slice begins. Invariants:

- the digest of a tensor is the sum of the digests of any slices that cover it once: it does not depend on layout,
  bucket, order or device;
- changing any one word changes it, since an odd factor times a non-zero difference below 2**64 is not zero.

The digest guards against faults, not against an adversary, who could choose weights that collide. A tensor's columns
are all its dimensions but the first, so a row is contiguous and either dimension can be sliced.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron_rl.ops.slices import Move, Placed, Slice

NUM_LANES = 2
_MOST_STACKED = 1 << 20
"""The most elements of a stack of slices: few enough that a CPU still has them in its cache when it digests them."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers that hold the bits of elements, by the elements' bytes."""
WORD_BYTES = 8
COLUMNS, ROWS = 0, (1, 2)
"""The axes that have factors: that of words, and that of rows for each lane."""


class NaiveDigester:
    """Digests slice by slice."""

    def __init__(self, slices: "Sequence[Slice]", dtype: torch.dtype, num_tensors: int):
        self._slices = slices
        self._dtype = dtype
        self._num_tensors = num_tensors

    def digest(self) -> torch.Tensor:
        """Sum the digests of each tensor's slices, in the dtype of their export: int64, (tensors, lanes)."""
        device = self._slices[0].values_RC.device if self._slices else None
        sums = torch.zeros(self._num_tensors, NUM_LANES, dtype=torch.int64, device=device)
        for values_RC, tensor, first_row, first_column in self._slices:
            if not values_RC.numel():
                continue
            # Another dtype needs a copy, which is made of some rows at a time.
            step = max(1, _chunk_elements(values_RC.device) // values_RC.shape[1])
            for start in range(0, len(values_RC), step):
                some_RC = values_RC[start : start + step].detach()
                sums[tensor] += digest(some_RC.to(self._dtype), first_row + start, first_column)
        return sums


class NaivePacker:
    """Packs slice by slice."""

    def __init__(self, batches: "Sequence[Sequence[Placed]]", dtype: torch.dtype):
        self._batches = batches
        self._dtype = dtype

    def pack(self, batch: int, buffer: torch.Tensor) -> None:
        """Copy the slices of a batch into a buffer of bytes on their device, in the dtype of their export."""
        for values_RC, first_byte in self._batches[batch]:
            num_bytes = values_RC.numel() * self._dtype.itemsize
            place = buffer[first_byte : first_byte + num_bytes].view(self._dtype)
            place.view(values_RC.shape).copy_(values_RC)


class NaiveMover:
    """Copies slice by slice."""

    def __init__(self, moves: "Sequence[Move]"):
        self._moves = moves

    def move(self) -> None:
        """Copy every slice to its place, in the place's dtype."""
        for values_RC, place_RC in self._moves:
            place_RC.copy_(values_RC)


def digest(slice_RC: torch.Tensor, first_row: int = 0, first_column: int = 0) -> torch.Tensor:
    """Digest a slice that starts at (first_row, first_column) of its tensor: int64, one number per lane."""
    sums_R = _sum_rows(slice_RC.detach().reshape(slice_RC.shape[0], -1), first_column)
    rows = [get_factors(axis, first_row + len(sums_R), sums_R.device)[first_row:] for axis in ROWS]
    return torch.stack([(sums_R * rows_R).sum() for rows_R in rows])


def digest_each(slices: Sequence[tuple[torch.Tensor, int, int]]) -> torch.Tensor:
    """Digest each slice on its own; it is given with its first row and first column: int64, (slices, lanes).

    An operation takes longer to begin than to run on a few thousand numbers. So slices of one shape and place, as those
    of a model's layers are, are stacked and digested together.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for number, (slice_RC, first_row, first_column) in enumerate(slices):
        kind = (slice_RC.shape, slice_RC.dtype, slice_RC.device, first_row, first_column)
        alike.setdefault(kind, []).append(number)
    lanes = torch.zeros(len(slices), NUM_LANES, dtype=torch.int64, device=slices[0][0].device if slices else None)
    for numbers in alike.values():
        first_RC, first_row, first_column = slices[numbers[0]]
        most = max(1, _MOST_STACKED // max(1, first_RC.numel()))
        for some in (numbers[start : start + most] for start in range(0, len(numbers), most)):
            parts = [slices[number][0].detach() for number in some]
            stack_SRC = torch.stack(parts) if len(parts) > 1 else parts[0][None]
            sums_R = _sum_rows(stack_SRC.reshape(len(some) * len(first_RC), -1), first_column)
            sums_SR = sums_R.view(len(some), -1)
            rows = [get_factors(axis, first_row + len(first_RC), sums_R.device)[first_row:] for axis in ROWS]
            lanes[some] = torch.stack([(sums_SR * rows_R).sum(1) for rows_R in rows], dim=1)
    return lanes


def digests_by_row(
    matrix_RC: torch.Tensor,
    first_column: int,
    rows_R: torch.Tensor,
    num_rows: int,
    slices_R: torch.Tensor,
    num_slices: int,
) -> torch.Tensor:
    """Digest, in one pass, slices that lie one below the other in a matrix: (num_slices, lanes).

    Row i of the matrix belongs to slice `slices_R[i]` and is row `rows_R[i]` of its tensor, from `first_column` on;
    `num_rows` is above all these row numbers. Rows of the slice `num_slices` are ignored.
    """
    sums_R = _sum_rows(matrix_RC.detach(), first_column)
    lanes = []
    for axis in ROWS:
        products_R = sums_R * get_factors(axis, num_rows, sums_R.device)[rows_R]
        sums_S = torch.zeros(num_slices + 1, dtype=torch.int64, device=sums_R.device)
        lanes.append(sums_S.index_add_(0, slices_R, products_R)[:num_slices])
    return torch.stack(lanes, dim=1)


def _sum_rows(slice_RC: torch.Tensor, first_column: int) -> torch.Tensor:
    """Sum the words of each row of a matrix, each times the factor of its column."""
    bits_RC, factors_C = _find_words(slice_RC, first_column) or _elements(slice_RC, first_column)
    if bits_RC.dtype == torch.int64 and bits_RC.device.type == "cpu":
        # One pass; only CPUs can multiply matrices of integers.
        return torch.mv(bits_RC, factors_C)
    num_rows, num_columns = bits_RC.shape
    sums_R = torch.empty(num_rows, dtype=torch.int64, device=bits_RC.device)
    step = min(num_rows, max(1, _chunk_elements(bits_RC.device) // max(1, num_columns)))
    products_RC = torch.empty(step, num_columns, dtype=torch.int64, device=bits_RC.device)
    for start in range(0, num_rows, max(1, step)):
        chunk_RC = _unsigned(bits_RC[start : start + step])
        product_RC = torch.mul(chunk_RC, factors_C, out=products_RC[: chunk_RC.shape[0]])
        torch.sum(product_RC, dim=1, out=sums_R[start : start + step])
    return sums_R


def _find_words(slice_RC: torch.Tensor, first_column: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """View the slice as whole words, with the factor of each; None if it is not aligned to whole words."""
    if not is_of_words(slice_RC, first_column):
        return None
    per_word = WORD_BYTES // slice_RC.element_size()
    first, count = first_column // per_word, slice_RC.shape[1] // per_word
    return slice_RC.view(torch.int64), get_factors(COLUMNS, first + count, slice_RC.device)[first:]


def is_of_words(slice_RC: torch.Tensor, first_column: int = 0) -> bool:
    """Return whether the rows of a slice consist of whole words, both in memory and in the tensor."""
    per_word = WORD_BYTES // slice_RC.element_size()
    layout = (first_column, slice_RC.shape[1], slice_RC.stride(0), slice_RC.storage_offset())
    return slice_RC.stride(1) == 1 and not any(number % per_word for number in layout)


def _elements(slice_RC: torch.Tensor, first_column: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bits of the slice's elements, and the factor of each."""
    element_bytes, num_columns, device = slice_RC.element_size(), first_column + slice_RC.shape[1], slice_RC.device
    per_word = WORD_BYTES // element_bytes
    columns_C = torch.arange(first_column, num_columns, device=device)
    words_C = get_factors(COLUMNS, num_columns // per_word + 1, device)[columns_C // per_word]
    return slice_RC.view(BITS[element_bytes]), words_C << (columns_C % per_word * (8 * element_bytes))


def _unsigned(bits_RC: torch.Tensor) -> torch.Tensor:
    """Return the bits as unsigned numbers; whole words stay as they are, since arithmetic is modulo 2**64."""
    if bits_RC.element_size() == WORD_BYTES:
        return bits_RC
    return bits_RC.to(torch.int64) & ((1 << (8 * bits_RC.element_size())) - 1)


def _chunk_elements(device: torch.device) -> int:
    """Return a size that keeps temporaries in cache on a CPU, and keeps other devices busy."""
    return 1 << 17 if device.type == "cpu" else 1 << 26


def get_factors(axis: int, count: int, device: torch.device) -> torch.Tensor:
    """Return the first `count` factors of an axis; tables double in size, so that few are ever computed."""
    return _factor_table(axis, 1 << max(count - 1, 1).bit_length(), device)[:count]


@functools.lru_cache(maxsize=64)
def _factor_table(axis: int, count: int, device: torch.device) -> torch.Tensor:
    """Compute the first outputs of the axis's SplitMix64 generator, made odd; int64 arithmetic wraps modulo 2**64."""
    z = torch.arange(1, count + 1, dtype=torch.int64) * _signed(0x9E3779B97F4A7C15) + _signed((axis + 1) << 32)
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    return ((z ^ _shift_right(z, 31)) | 1).to(device)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift without sign: torch's own shift copies the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
