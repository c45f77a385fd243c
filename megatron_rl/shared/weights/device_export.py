"""Exports from a device: digests, and files that it fills, as `shards.HostExport` does block by block.

The device packs one parcel while it copies the one before, from two buffers of its own into the files' memory. The host
waits once a parcel, and touches none of its bytes. This needs files whose memory is page-locked in this process. They
stay so between publishes, since locking takes longer than copying. If locking is refused, and for tensors that are
divided by columns, the copies go to a buffer that is page-locked, from which the host copies them into the files.
"""

import itertools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_rl.ops.slices import (
    Digester,
    Placed,
    Slice,
    SlicePacker,
    build_digester,
    build_slice_packer,
    list_reasons_against_kernels,
)
from megatron_rl.platforms import Platform
from megatron_rl.shared.weights.delivery.messages import Strip
from megatron_rl.shared.weights.files import FilePlan, map_bytes
from megatron_rl.shared.weights.fingerprint import DTYPES
from megatron_rl.shared.weights.parcels import MOST_BYTES, Parcel, list_slices, plan_parcels
from megatron_rl.shared.weights.shards import Count, Digests, Shard, find_addresses

_NUM_BUFFERS = 2
_NUM_FOLDERS = 2
"""The folders that take turns: engines may still read one while the other is written."""
_log = logging.getLogger(__name__)

_FileId = tuple[int, int]


class _Sent(NamedTuple):
    """A parcel whose copies are queued."""

    parcel: Parcel
    done: Any
    """The event after the copies."""
    file: torch.Tensor
    staged: torch.Tensor | None
    """The buffer that copies went to, in place of the file."""


class DeviceExport:
    """Exports of shards on a device, with few launches and waits, whatever the number of tensors.

    What follows from the places of parameters is kept between publishes.
    """

    def __init__(self, platform: Platform, shards: Sequence[Shard], plan: FilePlan, most_bytes: int = MOST_BYTES):
        self.plan = plan
        self._platform = platform
        self._shards = shards
        self._dtypes = {name: DTYPES[spec.dtype] for name, spec in plan.specs.items()}
        self._tensors = list(plan.specs)
        self._parcels = plan_parcels(shards, plan, most_bytes)
        self._buffer_bytes = max((parcel.num_bytes for parcel in self._parcels), default=0)
        self._staging: list[torch.Tensor] = []
        self._packers: list[SlicePacker] = []
        self._packed: list[int] = []
        self._digesters: list[Digester] = []
        self._digested: list[int] = []
        self._folders: dict[tuple[_FileId, ...], dict[str, torch.Tensor]] = {}
        """The mapped files of the last folders, the oldest first."""
        self._refusal: str | None = None
        self._counts = torch.zeros(len(self._tensors), dtype=torch.int64)
        slices = list_slices(shards, self._tensors)
        for one in slices:
            self._counts[one.tensor] += one.values_RC.numel()
        by_dtype = self._by_dtype(slices).items()
        if reasons := [reason for dtype, some in by_dtype for reason in list_reasons_against_kernels(some, dtype)]:
            _log.warning(
                "weights are digested and packed without kernels, which takes longer: %s",
                "; ".join(dict.fromkeys(reasons)),
            )

    def add_digests(self, digests: Digests) -> None:
        """Add the digests of all that this rank owns. The host waits once."""
        addresses = find_addresses(self._shards)
        if not self._digesters or addresses != self._digested:
            by_dtype = self._by_dtype(list_slices(self._shards, self._tensors))
            self._digesters = [build_digester(some, dtype, len(self._tensors)) for dtype, some in by_dtype.items()]
            self._digested = addresses
        first, *others = [digester.digest() for digester in self._digesters]
        digests.add_all(sum(others, first).cpu(), self._counts)

    def _by_dtype(self, slices: Sequence[Slice]) -> dict[torch.dtype, list[Slice]]:
        """Divide slices by the dtype of their tensor; a rank that owns none has an empty list of the first dtype."""
        by_dtype: dict[torch.dtype, list[Slice]] = {}
        for one in slices:
            by_dtype.setdefault(self._dtypes[self._tensors[one.tensor]], []).append(one)
        return by_dtype or {self._dtypes[self._tensors[0]]: []}

    def write(self, folder: Path, count: Count | None = None) -> None:
        """Write all that this rank owns; `count` learns of the elements of each tensor that have arrived."""
        files = self._open(folder)
        packers, platform = self._get_packers(), self._platform
        device = self._shards[0].parameter.device
        buffers = [
            torch.empty(self._buffer_bytes, dtype=torch.uint8, device=device) for _ in self._parcels[:_NUM_BUFFERS]
        ]
        copies = platform.stream()
        sent: _Sent | None = None
        try:
            for number, parcel in enumerate(self._parcels):
                buffer = buffers[number % _NUM_BUFFERS]
                for packer in packers:
                    packer.pack(number, buffer)
                packed = platform.event()
                packed.record(platform.current_stream())
                copies.wait_event(packed)
                with platform.on(copies):
                    sending = self._send(number, parcel, buffer, files[parcel.file])
                sending.done.record(copies)
                # The parcel before has had the time of this one's packing.
                if sent is not None:
                    self._finish(sent, count)
                sent = sending
            if sent is not None:
                self._finish(sent, count)
        except BaseException:
            # The device must not read buffers, or write files, that are given back.
            copies.synchronize()
            raise

    def forget_files(self) -> None:
        """Unlock the files that are kept between publishes."""
        while self._folders:
            self._unlock(self._folders.popitem()[1])

    def _send(self, number: int, parcel: Parcel, buffer: torch.Tensor, file: torch.Tensor) -> _Sent:
        """Queue a parcel's copies to the host."""
        done = self._platform.event()
        staged: torch.Tensor | None = None
        if self._refusal is not None:
            staged = self._stage(number)
            staged[: parcel.num_bytes].copy_(buffer[: parcel.num_bytes], non_blocking=True)
            return _Sent(parcel, done, file, staged)
        for span, strip in _list_spans(parcel):
            if strip.num_rows == 1:
                place = file[strip.first_byte : strip.first_byte + strip.row_bytes]
            else:
                staged = self._stage(number)
                place = staged[span]
            place.copy_(buffer[span], non_blocking=True)
        return _Sent(parcel, done, file, staged)

    def _finish(self, sent: _Sent, count: Count | None) -> None:
        """Wait until a parcel has arrived in the files, and count its elements."""
        sent.done.synchronize()
        if sent.staged is not None:
            for span, strip in _list_spans(sent.parcel):
                if self._refusal is not None or strip.num_rows > 1:
                    rows = sent.staged[span].view(strip.num_rows, strip.row_bytes)
                    sent.file.as_strided(rows.shape, (strip.pitch_bytes, 1), strip.first_byte).copy_(rows)
        if count is not None:
            for name, num_bytes in sent.parcel.count_bytes().items():
                count(name, num_bytes // self._dtypes[name].itemsize)

    def _stage(self, number: int) -> torch.Tensor:
        """Return the page-locked buffer of a parcel, whose numbers take turns."""
        while len(self._staging) < min(_NUM_BUFFERS, len(self._parcels)):
            self._staging.append(self._platform.host_buffer(self._buffer_bytes))
        return self._staging[number % _NUM_BUFFERS]

    def _get_packers(self) -> list[SlicePacker]:
        """Build a packer for each dtype when they are first used, and again if a parameter lies elsewhere."""
        addresses = find_addresses(self._shards)
        if not self._packers or addresses != self._packed:
            self._packers = [
                build_slice_packer([self._list_placed(parcel, dtype) for parcel in self._parcels], dtype)
                for dtype in dict.fromkeys(self._dtypes.values())
            ]
            self._packed = addresses
        return self._packers

    def _list_placed(self, parcel: Parcel, dtype: torch.dtype) -> list[Placed]:
        parts = [part for part in parcel.parts if self._dtypes[part.piece.name] == dtype]
        # Tensors have even numbers of elements, so that wider ones lie well after narrower ones.
        assert all(part.first_byte % dtype.itemsize == 0 for part in parts)
        return [Placed(part.values(self._shards), part.first_byte) for part in parts]

    def _open(self, folder: Path) -> dict[str, torch.Tensor]:
        """Map the folder's files that this rank writes; lock those that are new, and unlock those of old folders."""
        names = sorted({parcel.file for parcel in self._parcels})
        ids = tuple(_identify(folder / name) for name in names)
        files = self._folders.pop(ids, {})
        self._folders[ids] = files
        while len(self._folders) > _NUM_FOLDERS:
            self._unlock(self._folders.pop(next(iter(self._folders))))
        for name in names:
            if name not in files:
                mapped = map_bytes(folder / name, self.plan.sizes[name])
                self._lock(mapped)
                files[name] = mapped
        return files

    def _lock(self, mapped: torch.Tensor) -> None:
        if self._refusal is not None or (refusal := self._platform.page_lock(mapped)) is None:
            return
        for files in self._folders.values():
            self._unlock(files)
        self._refusal = refusal
        _log.warning(
            "published files cannot be page-locked (%s): weights are copied to them through a buffer, by the host",
            refusal,
        )

    def _unlock(self, files: Mapping[str, torch.Tensor]) -> None:
        for mapped in files.values() if self._refusal is None else ():
            self._platform.page_unlock(mapped)


def _identify(path: Path) -> _FileId:
    """Return what tells this file from any other: while it is mapped, no other file gets its number."""
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _list_spans(parcel: Parcel) -> Iterator[tuple[slice, Strip]]:
    """Yield the bytes of each strip in the parcel."""
    strips = parcel.list_strips()
    ends = list(itertools.accumulate((strip.num_bytes for strip in strips), initial=0))
    yield from zip(itertools.starmap(slice, itertools.pairwise(ends)), strips, strict=True)
