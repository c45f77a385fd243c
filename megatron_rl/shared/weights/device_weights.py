"""The work of a device on a rank's shards at a publish: few launches and waits, whatever the number of tensors."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_rl.ops.slices import Digester, build_digester, list_reasons_against_kernels
from megatron_rl.platforms import Platform
from megatron_rl.shared.weights.device_files import Count, DeviceFiles
from megatron_rl.shared.weights.files import FilePlan
from megatron_rl.shared.weights.fingerprint import DTYPES
from megatron_rl.shared.weights.parcels import list_slices
from megatron_rl.shared.weights.shards import Digests, Shard, find_addresses

_log = logging.getLogger(__name__)


class DeviceWeights:
    """Shards on a device, for exports in one dtype. What follows from their places is kept between publishes."""

    def __init__(self, platform: Platform, shards: Sequence[Shard], plan: FilePlan):
        self._shards = shards
        self._tensors = list(plan.specs)
        self._dtype = DTYPES[next(iter(plan.specs.values())).dtype]
        self._files = DeviceFiles(platform, shards, plan)
        self._digester: Digester | None = None
        self._addresses: list[int] = []
        self._counts = torch.zeros(len(self._tensors), dtype=torch.int64)
        slices = list_slices(shards, self._tensors)
        for one in slices:
            self._counts[one.tensor] += one.values_RC.numel()
        if reasons := list_reasons_against_kernels(slices, self._dtype):
            _log.warning("weights are digested and packed without kernels, which takes longer: %s", "; ".join(reasons))

    def add_digests(self, digests: Digests) -> None:
        """Add the digests of all that this rank owns. The host waits once."""
        addresses = find_addresses(self._shards)
        if self._digester is None or addresses != self._addresses:
            slices = list_slices(self._shards, self._tensors)
            self._digester, self._addresses = build_digester(slices, self._dtype, len(self._tensors)), addresses
        digests.add_all(self._digester.digest().cpu(), self._counts)

    def write(self, folder: Path, count: Count | None = None) -> None:
        """Write all that this rank owns into files; `count` learns of the elements of each tensor that have arrived."""
        self._files.write(folder, count)

    def forget_files(self) -> None:
        """Unlock the files that are kept between publishes."""
        self._files.close()
