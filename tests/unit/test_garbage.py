"""Collections of garbage leave out the objects that existed before a loop, and no others."""

import gc
import time
import weakref

from megatron_rl.shared.garbage import leaving_out_what_exists


class Ring:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


def test_collections_look_at_new_objects_alone_until_the_end() -> None:
    before, many = weakref.ref(Ring()), [[number] for number in range(300_000)]
    begun = time.perf_counter()
    gc.collect()
    with_all = time.perf_counter() - begun
    with leaving_out_what_exists():
        assert before() is None
        kept = Ring()
        new, itself = weakref.ref(Ring()), weakref.ref(kept)
        begun = time.perf_counter()
        gc.collect()
        assert time.perf_counter() - begun < with_all / 3
        assert (new(), itself()) == (None, kept)
    assert len(many) == 300_000
    assert gc.get_freeze_count() == 0
