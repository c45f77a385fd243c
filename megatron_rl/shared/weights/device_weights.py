"""The work of a device on a rank's shards at a publish: few launches and waits, whatever the number of tensors."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_rl.ops.slices import Digester, Slice, build_digester, list_reasons_against_kernels
from megatron_rl.platforms import Platform
from megatron_rl.shared.weights.device_files import Count, DeviceFiles
from megatron_rl.shared.weights.files import FilePlan
from megatron_rl.shared.weights.fingerprint import DTYPES
from megatron_rl.shared.weights.parcels import list_slices
from megatron_rl.shared.weights.shards import Digests, Shard, find_addresses

_log = logging.getLogger(__name__)


class DeviceWeights:
    """Shards on a device, for exports by one plan. What follows from their places is kept between publishes."""

    def __init__(self, platform: Platform, shards: Sequence[Shard], plan: FilePlan):
        self._shards = shards
        self._tensors = list(plan.specs)
        self._dtypes = [DTYPES[spec.dtype] for spec in plan.specs.values()]
        self._files = DeviceFiles(platform, shards, plan)
        self._digesters: list[Digester] = []
        self._addresses: list[int] = []
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
        if not self._digesters or addresses != self._addresses:
            by_dtype = self._by_dtype(list_slices(self._shards, self._tensors))
            self._digesters = [build_digester(some, dtype, len(self._tensors)) for dtype, some in by_dtype.items()]
            self._addresses = addresses
        first, *others = [digester.digest() for digester in self._digesters]
        digests.add_all(sum(others, first).cpu(), self._counts)

    def _by_dtype(self, slices: Sequence[Slice]) -> dict[torch.dtype, list[Slice]]:
        """Divide slices by the dtype of their tensor; a rank that owns none has an empty list of the first dtype."""
        by_dtype: dict[torch.dtype, list[Slice]] = {}
        for one in slices:
            by_dtype.setdefault(self._dtypes[one.tensor], []).append(one)
        return by_dtype or {self._dtypes[0]: []}

    def write(self, folder: Path, count: Count | None = None) -> None:
        """Write all that this rank owns into files; `count` learns of the elements of each tensor that have arrived."""
        self._files.write(folder, count)

    def forget_files(self) -> None:
        """Unlock the files that are kept between publishes."""
        self._files.close()
