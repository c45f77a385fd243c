"""An offer holds until it is withdrawn, which waits for its readers; later readers find none."""

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatron_rl.errors import InputError, UsageError
from megatron_rl.shared.weights import offer as offers
from megatron_rl.shared.weights.offer import (
    OFFER_FILE,
    Offer,
    StillRead,
    identify_host,
    taken,
    withdraw_offer,
    write_offer,
)
from megatron_rl.trainer.mcore.publish.offers import Offers

pytestmark = pytest.mark.each_change

OFFER = Offer("fingerprint", identify_host(), "2.13.0", "run", "bfloat16", [("a", (2, 3))], [])
HOLD = """
import sys, time
from pathlib import Path
from megatron_rl.shared.weights.offer import taken
with taken(Path(sys.argv[1])) as offer:
    print(offer.fingerprint, flush=True)
    time.sleep(600)
"""


def hold(folder: Path) -> subprocess.Popen:
    """Start a process that holds the folder's offer."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"fingerprint\n"
    return process


def test_an_offer_is_read_as_it_was_written_by_this_user_alone(tmp_path):
    with taken(tmp_path) as found:
        assert found is None
    write_offer(tmp_path, OFFER)
    assert stat.S_IMODE((tmp_path / OFFER_FILE).stat().st_mode) == 0o600
    with taken(tmp_path) as found, taken(tmp_path) as same:
        assert found == same == OFFER


def test_to_withdraw_an_offer_waits_for_its_reader_and_ends_when_the_reader_is_killed(tmp_path):
    write_offer(tmp_path, OFFER)
    reader = hold(tmp_path)
    is_waiting, is_over = threading.Event(), threading.Event()

    def withdrawn() -> None:
        withdraw_offer(tmp_path, 60, lambda seconds: is_waiting.set())
        is_over.set()

    try:
        thread = threading.Thread(target=withdrawn)
        thread.start()
        assert is_waiting.wait(60)
        assert not is_over.is_set()
        with taken(tmp_path) as late:
            assert late is None
    finally:
        os.kill(reader.pid, signal.SIGKILL)
        reader.wait()
    assert is_over.wait(60)
    thread.join()
    withdraw_offer(tmp_path, 0)


def test_a_reader_that_opened_an_offer_just_before_it_was_withdrawn_finds_none(tmp_path, monkeypatch):
    write_offer(tmp_path, OFFER)
    lock = offers._lock

    def late(descriptor: int, kind: int) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(offers, "_lock", lock)
            withdraw_offer(tmp_path, 0)
        return lock(descriptor, kind)

    monkeypatch.setattr(offers, "_lock", late)
    with taken(tmp_path) as found:
        assert found is None


def test_a_reader_that_never_ends_is_an_error_that_names_the_way_out(tmp_path):
    write_offer(tmp_path, OFFER)
    with taken(tmp_path), pytest.raises(StillRead, match="--publish-through files"):
        withdraw_offer(tmp_path, 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"\x00", "cannot be read"), (msgspec.msgpack.encode(msgspec.structs.replace(OFFER, wire=9)), "has version 9")],
)
def test_an_offer_of_another_kind_is_refused(tmp_path, data, message):
    (tmp_path / OFFER_FILE).write_bytes(data)
    with pytest.raises(InputError, match=message), taken(tmp_path):
        raise AssertionError("it was read")


def test_a_trainer_of_adapters_offers_no_memory() -> None:
    weights: Any = SimpleNamespace(adapters=object(), architecture=SimpleNamespace(dtype="float32"), shards=[])
    weights.list_specs = lambda dtype: []
    platform = SimpleNamespace(name="cuda", device_sharing=object)
    session: Any = SimpleNamespace(world_size=1, rank=0, platform=platform)
    assert not Offers(weights, session, "auto", None, True).put(None, "f")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="adapters are trained"):
        Offers(weights, session, "ipc", None, True)
