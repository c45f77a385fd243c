"""A rank that fails while it saves ends by its own reason, whatever call the other ranks wait in."""

import pytest
import torch
import torch.distributed as dist

from megatron_rl.errors import InputError
from megatron_rl.trainer.mcore.checkpoint import serialization
from tests.distributed.layouts import CASES, start_session
from tests.ranks import run_ranks

REASON = "the disk of rank 1 is full"


def fail_on_the_second() -> list[str]:
    """Return what the call raises: first where the other rank fails with it, then where that rank waits meanwhile."""
    dist.init_process_group("gloo")
    return [raise_on_the_second(False), raise_on_the_second(True)]


def raise_on_the_second(others_wait: bool) -> str:
    with pytest.MonkeyPatch.context() as patch, start_session(CASES["TP2"]) as session:
        if others_wait:
            patch.setattr(serialization, "_TIMEOUT_SECONDS", 1.0)

        def save() -> None:
            if session.rank == 1:
                raise InputError(REASON)
            if others_wait:
                dist.all_reduce(torch.ones(1))

        try:
            serialization.run_together(session, save, serialization.unwritable)
        except Exception as error:
            return str(error)
    return "nothing was raised"


def test_a_rank_that_fails_alone_tells_the_others_why_and_does_not_wait_for_those_that_wait_for_it() -> None:
    first, second = run_ranks(fail_on_the_second, 2, timeout=100)
    assert (first[0], second) == (REASON, [REASON, REASON])
    # The other rank's process ended, which ended the collective.
    assert first[1] not in ("nothing was raised", REASON)
