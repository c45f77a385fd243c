"""The copies of micro-batches to the emulated device: one from pinned memory, and ordered by events."""

from unittest import mock

import pytest
import torch

from megatron_rl import platforms
from megatron_rl.ops.shared_prompt import BACKENDS
from megatron_rl.trainer.data.device_copier import DeviceCopier
from megatron_rl.trainer.data.packing import Pack, pack_groups
from tests.rehearsal.device import OnDevice
from tests.rehearsal.rehearsed import rehearsed
from tests.rehearsal.streams import DeviceFault
from tests.rehearsal.syncs import log


def draw_pack() -> Pack:
    pack = pack_groups([([1, 2, 3], [[4, 5], [6]])])
    for backend in BACKENDS.values():
        backend.prepare(pack.layout, torch.device("npu:0"))
    return pack


def compute(copier: DeviceCopier, num_packs: int) -> None:
    """Compute with packs one after the other; each is freed while the device may still compute with it."""
    for _ in range(num_packs):
        pack = draw_pack()
        copied, pending = copier.copy(pack, pack.layout)
        pending.wait()
        copied.tokens_T + 1


@rehearsed
def test_a_pack_with_the_tables_of_every_attention_takes_one_copy_and_no_wait() -> None:
    copier = DeviceCopier(platforms.select("npu"))
    first = len(log.copies)
    with log.during() as syncs:
        compute(copier, 3)
    assert not syncs
    assert [copy.is_pinned for copy in log.copies[first:]] == [True] * 3


@rehearsed
def test_a_pack_is_used_only_once_it_has_arrived() -> None:
    pack = draw_pack()
    copied, pending = DeviceCopier(platforms.select("npu")).copy(pack, pack.layout)
    with pytest.raises(DeviceFault, match="no event between"):
        copied.tokens_T + 1
    pending.wait()
    assert (copied.tokens_T + 1).tolist() == [2, 3, 4, 5, 6, 7]


@rehearsed
def test_the_memory_of_a_pack_is_not_used_again_before_the_computing_queue_is_done_with_it() -> None:
    copier = DeviceCopier(platforms.select("npu"))
    with mock.patch.object(OnDevice, "record_stream"), pytest.raises(DeviceFault, match="memory is used again"):
        compute(copier, 3)
