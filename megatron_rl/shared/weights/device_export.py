"""Exports from a device: digests, and files that it fills, as `shards.HostExport` does block by block.

The device packs one parcel while it copies the one before, from two buffers of its own into the files' memory. The host
waits once a parcel, and touches none of its bytes. This needs files whose memory is page-locked in this process. They
stay so between publishes, since locking takes longer than copying. If locking is refused, and for tensors that are
divided by columns, the copies go to a buffer that is page-locked, from which the host copies them into the files.
"""

import collections
import logging
import os
from collections.abc import Sequence
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
from megatron_rl.shared.weights.files import FilePlan, map_bytes
from megatron_rl.shared.weights.fingerprint import DTYPES
from megatron_rl.shared.weights.parcels import MOST_BYTES, Parcel, Part, list_slices, plan_parcels
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
    files: dict[str, torch.Tensor]
    staged: torch.Tensor | None
    """The buffer that the copies went to, in place of the files."""


class DeviceFiles:
    """A rank's writes into files that were laid out, always by the same plan."""

    def __init__(self, platform: Platform, shards: Sequence[Shard], plan: FilePlan, most_bytes: int = MOST_BYTES):
        self._platform = platform
        self._shards = shards
        self.plan = plan
        self._dtypes = {name: DTYPES[spec.dtype] for name, spec in plan.specs.items()}
        self._parcels = plan_parcels(shards, plan, most_bytes)
        self._buffer_bytes = max((parcel.num_bytes for parcel in self._parcels), default=0)
        self._staging: list[torch.Tensor] = []
        self._packers: list[SlicePacker] = []
        self._addresses: list[int] = []
        self._locked: dict[_FileId, torch.Tensor] = {}
        self._folders: collections.deque[frozenset[_FileId]] = collections.deque()
        self._refusal: str | None = None

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
                    sending = self._send(number, parcel, buffer, files)
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
        self._folders.clear()
        self._forget_old_files()

    def _send(self, number: int, parcel: Parcel, buffer: torch.Tensor, files: dict[str, torch.Tensor]) -> _Sent:
        """Queue a parcel's copies to the host."""
        done, file = self._platform.event(), files[parcel.file]
        if self._refusal is not None:
            staged = self._stage(number)
            staged[: parcel.num_bytes].copy_(buffer[: parcel.num_bytes], non_blocking=True)
            return _Sent(parcel, done, files, staged)
        for first, place, length in parcel.runs():
            file[place : place + length].copy_(buffer[first : first + length], non_blocking=True)
        staged_parts = [part for part in parcel.parts if not part.is_run]
        if not staged_parts:
            return _Sent(parcel, done, files, None)
        staged = self._stage(number)
        for part in staged_parts:
            span = slice(part.first_byte, part.first_byte + part.num_bytes)
            staged[span].copy_(buffer[span], non_blocking=True)
        return _Sent(parcel, done, files, staged)

    def _finish(self, sent: _Sent, count: Count | None) -> None:
        """Wait until a parcel has arrived in the files, and count its elements."""
        sent.done.synchronize()
        for part in sent.parcel.parts:
            if sent.staged is not None and (self._refusal is not None or not part.is_run):
                _copy_rows(sent.staged, sent.files[sent.parcel.file], part)
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
        if not self._packers or addresses != self._addresses:
            self._packers = [
                build_slice_packer([self._list_placed(parcel, dtype) for parcel in self._parcels], dtype)
                for dtype in dict.fromkeys(self._dtypes.values())
            ]
            self._addresses = addresses
        return self._packers

    def _list_placed(self, parcel: Parcel, dtype: torch.dtype) -> list[Placed]:
        parts = [part for part in parcel.parts if self._dtypes[part.piece.name] == dtype]
        # Tensors have even numbers of elements, so that wider ones lie well after narrower ones.
        assert all(part.first_byte % dtype.itemsize == 0 for part in parts)
        return [Placed(part.values(self._shards), part.first_byte) for part in parts]

    def _open(self, folder: Path) -> dict[str, torch.Tensor]:
        """Map the folder's files that this rank writes; lock those that are new, and unlock those of old folders."""
        names = sorted({parcel.file for parcel in self._parcels})
        ids = {name: _identify(folder / name) for name in names}
        folder_ids = frozenset(ids.values())
        if folder_ids in self._folders:
            self._folders.remove(folder_ids)
        self._folders.append(folder_ids)
        while len(self._folders) > _NUM_FOLDERS:
            self._folders.popleft()
        self._forget_old_files()
        files = {}
        for name, file_id in ids.items():
            if file_id not in self._locked:
                mapped = map_bytes(folder / name, self.plan.sizes[name])
                self._lock(mapped)
                self._locked[file_id] = mapped
            files[name] = self._locked[file_id]
        return files

    def _lock(self, mapped: torch.Tensor) -> None:
        if self._refusal is not None:
            return
        self._refusal = self._platform.page_lock(mapped)
        if self._refusal is None:
            return
        self._unlock(list(self._locked.values()))
        _log.warning(
            "published files cannot be page-locked (%s): weights are copied to them through a buffer, by the host",
            self._refusal,
        )

    def _forget_old_files(self) -> None:
        kept = frozenset().union(*self._folders)
        old = [self._locked.pop(file_id) for file_id in list(self._locked) if file_id not in kept]
        if self._refusal is None:
            self._unlock(old)

    def _unlock(self, files: Sequence[torch.Tensor]) -> None:
        for mapped in files:
            self._platform.page_unlock(mapped)


def _identify(path: Path) -> _FileId:
    """Return what tells this file from any other: while it is mapped, no other file gets its number."""
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _copy_rows(staged: torch.Tensor, file: torch.Tensor, part: Part) -> None:
    """Copy a part's rows from where a parcel has been staged to their places in the file."""
    rows = staged[part.first_byte : part.first_byte + part.num_bytes].view(part.num_rows, part.row_bytes)
    places = file.as_strided((part.num_rows, part.row_bytes), (part.pitch_bytes, 1), part.file_byte)
    places.copy_(rows)


class DeviceExport(DeviceFiles):
    """Exports of shards on a device, with few launches and waits, whatever the number of tensors.

    What follows from the places of parameters is kept between publishes.
    """

    def __init__(self, platform: Platform, shards: Sequence[Shard], plan: FilePlan):
        super().__init__(platform, shards, plan)
        self._tensors = list(plan.specs)
        self._digesters: list[Digester] = []
        self._digested: list[int] = []
        self._counts = torch.zeros(len(self._tensors), dtype=torch.int64)
        slices = list_slices(shards, self._tensors)
        for one in slices:
            self._counts[one.tensor] += one.values_RC.numel()
        reasons = [
            reason
            for dtype, some in self._by_dtype(slices).items()
            for reason in list_reasons_against_kernels(some, dtype)
        ]
        if reasons:
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
