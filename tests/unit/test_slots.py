"""The data loader: batches of slots, in order, one ahead, made once, and of this version only."""

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from unittest import mock

import msgspec
import numpy as np
import pytest

from megatron_rl.algorithm.advantages import GroupAdvantages
from megatron_rl.algorithm.settings import AlgorithmConfig
from megatron_rl.errors import MegatronRLError
from megatron_rl.ops.shared_prompt.layout import Layout
from megatron_rl.platforms.cpu import CpuPlatform
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.slots import divide
from megatron_rl.trainer.data.batch import Batch, Batcher
from megatron_rl.trainer.data.device_copier import DeviceCopier
from megatron_rl.trainer.data.slots import Identity, IterationSlots, SlotRefused

MEAN = GroupAdvantages(AlgorithmConfig(advantage="mean"))
PLAN = wire.Plan(num_prompts=8, group_size=2, num_replicas=1, micro_batch_size=4, num_updates=2)
IDENTITY = Identity("run", 3, "weights-3")


def response(length: int, reward: float = 0.0, version: str = "3", fingerprint: str = "weights-3") -> wire.Response:
    return wire.Response(
        tokens=wire.encode_tokens(range(length)),
        log_probs=wire.encode_log_probs(-np.arange(length) / 8),
        finish_reason="stop",
        seed=1,
        engine="0",
        spans=[wire.VersionSpan(version=version, start=0, end=length)],
        fingerprint=fingerprint,
        reward=reward,
    )


def slot(index: int = 0, **changes) -> wire.Slot:
    responses = [response(3, 1.0), response(5, 0.0)]
    part = wire.GroupPart(
        prompt_index=index, row=f"rows:{index}", prompt_tokens=wire.encode_tokens([7, 8]), first_response=0,
        responses=responses, rewards=[1.0, 0.0],
    )  # fmt: skip
    made = wire.Slot(run="run", version=3, fingerprint="weights-3", replica=0, index=index, parts=[part, part])
    return msgspec.structs.replace(made, **changes)


class Source:
    """A source that gives slots when they are released."""

    def __init__(self):
        self.asked: list[int] = []
        self.let_go = [threading.Event() for _ in range(4)]

    def fetch(self, index: int) -> wire.Slot:
        self.asked.append(index)
        assert self.let_go[index].wait(10)
        return slot(index)


def slots_of(fetch, **options) -> IterationSlots:
    return IterationSlots(fetch, Batcher(MEAN), divide(PLAN), IDENTITY, DeviceCopier(CpuPlatform()), **options)


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_rank_asks_for_slots_in_order_and_one_ahead():
    source = Source()
    source.let_go[0].set()
    slots = slots_of(source.fetch)
    updates = iter(slots.select_update(0))
    assert source.asked == []
    assert next(updates).index == 0
    until(lambda: source.asked == [0, 1])
    time.sleep(0.05)
    assert source.asked == [0, 1]
    for event in source.let_go:
        event.set()
    assert [batch.index for batch in (*updates, *slots.select_update(1))] == [1, 2, 3]
    assert source.asked == [0, 1, 2, 3]


def test_a_batch_is_made_once_for_all_passes():
    source = Source()
    for event in source.let_go:
        event.set()
    slots = slots_of(source.fetch)
    one, other = list(slots.select_update(1)), list(slots.select_after(0))
    assert [a is b for a, b in zip(one, other, strict=True)] == [True, True]
    assert sorted(source.asked) == [0, 1, 2, 3]


def test_waiting_is_measured_only_while_a_batch_is_wanted():
    source = Source()
    entered = []

    class Waiting:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append(("in", self.index))

        def __exit__(self, *_):
            entered.append(("out", self.index))

    slots = slots_of(source.fetch, waiting=Waiting)
    thread = threading.Thread(target=slots.wait_for_all)
    thread.start()
    until(lambda: entered == [("in", 0)])
    for event in source.let_go:
        event.set()
    thread.join(5)
    assert entered == [(what, index) for index in range(4) for what in ("in", "out")]


def test_a_fault_of_the_service_is_raised_where_the_batch_is_wanted():
    def fails(index: int) -> wire.Slot:
        raise MegatronRLError("iteration 3 failed: an engine is lost")

    with pytest.raises(MegatronRLError, match="an engine is lost"):
        next(iter(slots_of(fails).select_update(0)))


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"run": "another"},
        {"fingerprint": "weights-2"},
        {"response": response(3, version="2")},
        {"response": response(3, fingerprint="weights-2")},
        {"response": msgspec.structs.replace(response(3), spans=[])},
        {"response": msgspec.structs.replace(response(3), spans=[wire.VersionSpan(version="3", start=0, end=2)])},
        {
            "response": msgspec.structs.replace(
                response(3),
                spans=[wire.VersionSpan(version="2", start=0, end=1), wire.VersionSpan(version="3", start=1, end=3)],
            )
        },
    ],
    ids=["version", "run", "weights", "older", "others", "no span", "short span", "two versions"],
)
def test_a_slot_that_was_not_sampled_from_this_version_is_refused(changes):
    def fetch(index: int) -> wire.Slot:
        given = dict(changes)
        made = slot(index)
        if (other := given.pop("response", None)) is not None:
            made.parts[0].responses[0] = other
        return msgspec.structs.replace(made, **given)

    with pytest.raises(SlotRefused, match="slot \\(0, 0\\) of iteration 3"):
        slots_of(fetch).batch(0)


def test_a_batch_holds_each_response_after_one_copy_of_its_prompt():
    batch = Batcher(MEAN, multiple_of=8).batch(slot())
    assert batch.pack.num_tokens == 24  # two groups of 2 + 3 + 5, padded
    assert batch.lengths_S.tolist() == [3, 5, 3, 5]
    assert batch.advantages_S.tolist() == [0.5, -0.5, 0.5, -0.5]
    assert batch.pack.target_tokens_N.tolist() == [0, 1, 2, 0, 1, 2, 3, 4] * 2
    assert batch.engine_log_probs_N.tolist() == [-0.0, -0.125, -0.25, -0.0, -0.125, -0.25, -0.375, -0.5] * 2


def test_a_part_of_a_group_has_the_advantages_that_the_whole_group_gives_it():
    whole = slot()
    part = msgspec.structs.replace(
        whole.parts[0], first_response=1, responses=whole.parts[0].responses[1:], rewards=[1.0, 0.0]
    )
    batch = Batcher(MEAN).batch(msgspec.structs.replace(whole, parts=[part]))
    assert batch.advantages_S.tolist() == [-0.5]


def test_without_sharing_each_response_follows_a_prompt_of_its_own():
    pack = Batcher(MEAN, is_shared=False).batch(slot()).pack
    assert pack.num_tokens == 2 * (2 + 3 + 2 + 5)
    shared = Batcher(MEAN).batch(slot()).pack
    assert pack.target_tokens_N.tolist() == shared.target_tokens_N.tolist()
    assert pack.target_sequences_N.tolist() == shared.target_sequences_N.tolist()


def test_a_layout_is_prepared_where_the_batch_is_made():
    prepared: list[Layout] = []
    batch = Batcher(MEAN, prepare=prepared.append).batch(slot())
    assert prepared[0] is batch.copy_to_device(DeviceCopier(CpuPlatform())).pack.layout


class OnDevice:
    """A count of the batches that were moved to the device and are alive, with all that their layouts keep there."""

    def __init__(self):
        self.num_alive, self.most, self.num_moved = 0, 0, 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        move = Batch.copy_to_device

        def moved(batch: Batch, copier: DeviceCopier) -> Batch:
            result = move(batch, copier)
            self.num_moved += 1
            self.num_alive += 1
            self.most = max(self.most, self.num_alive)
            # The attention's preparations live as long as the layout.
            weakref.finalize(result.pack.layout, self._end)
            return result

        with mock.patch.object(Batch, "copy_to_device", moved):
            yield

    def _end(self) -> None:
        self.num_alive -= 1


def ready_slots(num_slots: int, num_updates: int, **options) -> IterationSlots:
    plan = wire.Plan(
        num_prompts=2 * num_slots, group_size=2, num_replicas=1, micro_batch_size=4, num_updates=num_updates
    )
    return IterationSlots(slot, Batcher(MEAN), divide(plan), IDENTITY, DeviceCopier(CpuPlatform()), **options)


@pytest.mark.parametrize("num_updates", [1, 3])
@pytest.mark.parametrize("num_ahead", [1, 12])
@pytest.mark.parametrize("is_sync", [False, True], ids=["periodic", "sync"])
def test_a_batch_is_on_the_device_while_it_is_used_and_one_ahead(num_updates, num_ahead, is_sync):
    device = OnDevice()
    with device.counted():
        slots = ready_slots(12, num_updates, num_ahead=num_ahead)
        if is_sync:
            slots.wait_for_all()
            assert device.num_moved == 0
        for update in range(num_updates):
            of_update = slots.select_update(update)
            of_update.wait_for_first()
            for batch in of_update:
                assert batch.num_responses == 4
            del batch
            assert [one.num_targets for one in of_update.facts] == [16] * len(of_update)
        assert [part.prompt_index for one in slots.list_facts() for part in one.parts] == sorted([*range(12)] * 2)
        slots.finish()
    assert device.num_moved == 12
    assert device.most <= 3
    until(lambda: device.num_alive == 0)


def test_a_pass_of_its_own_makes_the_same_batches_again_and_keeps_none():
    device = OnDevice()
    with device.counted():
        slots = ready_slots(12, 2)
        passes = [
            [batch.pack.tokens_T.tolist() for batch in of] for of in (slots.select_update(0), slots.select_after(0))
        ]
        of_update = slots.select_update(1)
        passes += [[batch.pack.tokens_T.tolist() for batch in of_update] for _ in range(2)]
        slots.finish()
    assert passes[1] == passes[2] == passes[3]
    assert device.num_moved >= 24
    assert device.most <= 3
    until(lambda: device.num_alive == 0)


def test_a_batch_stays_on_the_device_until_the_last_chunk_has_had_it():
    """Let the chunks of a rank go through the micro-batches one after the other, as in an interleaved schedule."""
    device = OnDevice()
    with device.counted():
        slots = ready_slots(12, 1)
        of_update = slots.select_update(0)
        first, second = iter(of_update), iter(of_update)
        for _ in range(3):
            given = [next(first).index for _ in range(4)], [next(second).index for _ in range(4)]
            assert given[0] == given[1]
        assert [*first, *second] == []
        slots.finish()
    assert device.num_moved == 12
    assert device.most <= 4 + 3
    until(lambda: device.num_alive == 0)
