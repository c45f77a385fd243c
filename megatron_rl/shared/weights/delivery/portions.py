"""The portions in which a rank sends what it owns."""

from collections.abc import Sequence

from megatron_rl.shared.weights.delivery.messages import Contents, File, Portion, Strip
from megatron_rl.shared.weights.files import FilePlan
from megatron_rl.shared.weights.fingerprint import DTYPES
from megatron_rl.shared.weights.parcels import Parcel, plan_parcels
from megatron_rl.shared.weights.shards import Shard

PORTION_BYTES = 1 << 24
"""The bytes that are sent again after a connection broke; a larger number costs less work for each byte."""


def list_portions(
    shards: Sequence[Shard], plan: FilePlan, writer: int, most_bytes: int = PORTION_BYTES
) -> list[Portion]:
    """Divide what a rank owns, which must be the writer of this number."""
    files = {file: number for number, file in enumerate(plan.sizes)}
    tensors = {name: number for number, name in enumerate(sorted(plan.specs))}
    return [
        Portion(files[parcel.file], writer, tuple(_list_strips(parcel)), tuple(_count(parcel, plan, tensors)))
        for parcel in plan_parcels(shards, plan, most_bytes)
    ]


def describe_contents(plan: FilePlan, num_writers: int, portions: Sequence[Portion]) -> Contents:
    """Describe a version whose portions these are, those of all writers."""
    files = tuple(File(name, size, plan.headers[name]) for name, size in plan.sizes.items())
    return Contents(files, tuple(sorted(plan.specs)), num_writers, tuple(portions))


def _list_strips(parcel: Parcel) -> list[Strip]:
    """List the parcel's parts, joining those that lie together in the file."""
    strips: list[Strip] = []
    for part in parcel.parts:
        length = part.num_bytes
        if not part.is_run:
            strips.append(Strip(part.file_byte, part.num_rows, part.row_bytes, part.pitch_bytes))
            continue
        last = strips[-1] if strips else None
        if last is not None and last.num_rows == 1 and last.first_byte + last.row_bytes == part.file_byte:
            length += last.row_bytes
            strips[-1] = Strip(last.first_byte, 1, length, length)
        else:
            strips.append(Strip(part.file_byte, 1, length, length))
    return strips


def _count(parcel: Parcel, plan: FilePlan, tensors: dict[str, int]) -> list[tuple[int, int]]:
    return [
        (tensors[name], num_bytes // DTYPES[plan.specs[name].dtype].itemsize)
        for name, num_bytes in parcel.count_bytes().items()
    ]
