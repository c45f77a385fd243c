"""The end of a rank's process."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from megatron_rl.trainer.loop.entry import Entry


class Holder:
    """An object that holds itself, as models and their groups do."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collected_by_hand() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("collected_by_hand")
@pytest.mark.parametrize("code", [0, 1])
def test_a_process_that_ends_well_releases_objects_that_only_cycles_hold(code: int) -> None:
    # After a failure a peer may be gone, and destroying the group would wait for it.
    held: list[weakref.ref[Holder]] = []

    def act(entry: Entry) -> int:
        held.append(weakref.ref(Holder()))
        return code

    assert Entry("a rank").run(act) == code
    assert (held[0]() is None) == (code == 0)
