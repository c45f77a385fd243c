"""The packs of an update, over replicas, and the end of a run whose loss is not finite."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.errors import ExitCode
from megatron_rl.platforms.cpu import CpuPlatform
from megatron_rl.shared.protocol.slots import divide
from megatron_rl.shared.protocol.wire import Plan
from megatron_rl.trainer.data.demonstrations import Demonstration, DemonstrationSource
from megatron_rl.trainer.data.device_copier import DeviceCopier
from megatron_rl.trainer.loop.learner import TrainingFailed
from megatron_rl.trainer.loop.supervised import Imitation, Packer, Packs, SupervisedStage, _check, divide_held_out


def draw(number: int) -> Demonstration:
    """Make a demonstration whose tokens are its number."""
    return Demonstration(f"row {number}", ((np.full(2, number, np.int32), np.full(1, number, np.int32)),))


def packer(entered: list[str] | None = None) -> Packer:
    @contextlib.contextmanager
    def packing() -> Iterator[None]:
        if entered is not None:
            entered.append("packing")
        yield

    return Packer(DeviceCopier(CpuPlatform()), 1, 1000, 1, lambda layout: None, packing)


def session_of(replica: int, num_replicas: int) -> SimpleNamespace:
    return SimpleNamespace(replica=replica, num_replicas=num_replicas, broadcast=lambda item: item)


def rows_of(packs: Packs) -> list[list[int]]:
    """Return the numbers of the demonstrations of each micro-batch."""
    return [sorted({*pack.tokens_T.tolist()}) for pack in packs]


def test_packs_are_made_before_they_are_asked_for_and_it_is_noted_when_one_is_given():
    entered: list[str] = []
    packs = Packs([[draw(1)], [draw(2), draw(3)]], packer(entered), Imitation())
    assert len(entered) == len(packs) == 2
    # Two chunks of a model.
    first, second = iter(packs), iter(packs)
    one = next(first)
    assert len(entered) == 3
    assert next(second) is one
    assert next(first) is next(second)
    assert (packs.num_rows, packs.num_tokens) == (3, 9)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_replicas_share_every_update_and_leave_nothing_out(replicas: int, size: int, slots: int) -> None:
    count = replicas * size * slots
    plan = Plan(num_prompts=count, group_size=1, num_replicas=replicas, micro_batch_size=size, order="prompt")
    of_update: list[list[int]] = [[], []]
    for replica in range(replicas):
        source = DemonstrationSource([draw(number) for number in range(2 * count)], seed=0, shuffle=False)
        stage = SupervisedStage("run", None, session_of(replica, replicas), divide(plan), packer(), source, 1)
        for taken in of_update:
            packs = rows_of(stage.take())
            assert [len(rows) for rows in packs] == [size] * slots
            taken += [row for rows in packs for row in rows]
    assert sorted(of_update[0]) == [*range(count)]
    assert sorted(of_update[1]) == [*range(count, 2 * count)]


@given(st.integers(0, 20), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_replicas_share_what_is_held_out_in_equally_many_packs(count: int, size: int, replicas: int, turn: int) -> None:
    held_out = [draw(number) for number in range(count)]
    parts = [divide_held_out(held_out, size, session_of(replica, replicas), turn) for replica in range(replicas)]
    assert len({len(of_replica) for of_replica in parts}) == 1
    assert len(parts[0]) % turn == 0
    assert len(parts[0]) - turn < max(1, -(-count // (size * replicas)))
    found = [one.row for of_replica in parts for part in of_replica for one in part]
    assert sorted(found) == sorted(one.row for one in held_out)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run_by_name(loss):
    with pytest.raises(TrainingFailed, match=f"the loss of micro-batch 1 is {loss}: nothing was updated") as raised:
        _check([1.0, loss])
    assert raised.value.exit_code == ExitCode.RUN
    _check([1.0, -2.0])
