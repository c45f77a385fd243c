"""A rank that fails while it saves ends by its own reason, whatever call the other ranks wait in."""

import pytest
import torch
import torch.distributed as dist

from megatron_rl.errors import InputError
from megatron_rl.trainer.mcore.checkpoint import serialization
from tests.distributed.layouts import CASES, start_session
from tests.ranks import run_ranks

REASON = "the disk of rank 1 is full"


def fail_on_the_second(others_wait: bool) -> str:
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


def test_a_rank_that_fails_alone_does_not_wait_for_those_that_wait_for_it() -> None:
    first, second = run_ranks(fail_on_the_second, 2, True, timeout=100)
    assert second == REASON
    # The other rank's process ended, which ended the collective.
    assert first not in ("nothing was raised", REASON)


def test_a_rank_that_fails_tells_the_others_why() -> None:
    assert run_ranks(fail_on_the_second, 2, False) == [REASON, REASON]
