"""The command megatron-rl hosts."""

import asyncio
from types import TracebackType
from typing import Any

import pytest

from megatron_rl.commands import hosts
from megatron_rl.errors import InputError, UsageError
from megatron_rl.observe.rank_places import RankPlace, RankPlaces, ReadPlaces, read_places
from tests.sidecar.fake_engines import FakeFactory, weights
from tests.sidecar.supervised import supervised

LOST = "its host 10.0.0.3:7100 has not answered for 21 s"


def ask_engines() -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        async with supervised(FakeFactory(), 3) as supervisor:
            await supervisor.publish(weights(12))
            supervisor.remove("engine-1")
            return supervisor.status()

    return asyncio.run(ask())


def make_status() -> dict[str, Any]:
    return {
        "run": "maths", "version": 12, "engines": ask_engines(),
        "hosts": {
            "10.0.0.2:7100": {"state": "up", "silent_seconds": 0.3, "engines": ["engine-1", "engine-2"], "error": None},
            "10.0.0.3:7100": {"state": "lost", "silent_seconds": 21.4, "engines": [], "error": LOST},
        },
    }  # fmt: skip


def test_each_engine_stands_beside_its_host_and_errors_below():
    title, head, *rows, error = [line.split("  ") for line in hosts.describe(make_status())]
    assert title == ["run maths, version 12"]
    words = [[word.strip() for word in row if word.strip()] for row in [head, *rows]]
    assert words == [
        ["host", "state", "silent", "engine", "state", "step", "in flight", "restarts"],
        ["(own host)", "up", "engine-0", "ready", "0", "0"],
        ["10.0.0.2:7100", "up", "0.3 s", "engine-1", "ready, leaving", "0", "0"],
        ["engine-2", "ready", "0", "0"],
        ["10.0.0.3:7100", "lost", "21.4 s", "none"],
    ]
    assert error == ["host 10.0.0.3:7100 has not answered for 21 s"]


def test_an_engine_whose_host_is_back_is_not_called_lost():
    status = make_status()
    engines = status["engines"]["engines"]
    for name in ("engine-1", "engine-2"):
        engines[name]["error"] = f"engine {name}: its host 10.0.0.2:7100 is lost: it has not answered for 21 s"
    engines["engine-2"]["state"] = "starting"
    *_, back, error = hosts.describe(status)
    assert "engine engine-2 is started again: its host 10.0.0.2:7100 is back" in (back, error)
    assert not any("10.0.0.2:7100 is lost" in line for line in hosts.describe(status))
    engines["engine-2"]["error"] = "engine engine-2 ended before it was ready: its server has ended"
    assert engines["engine-2"]["error"] in list(hosts.describe(status))


def test_a_run_without_other_hosts_has_its_own_alone():
    lines = list(hosts.describe({**make_status(), "hosts": {}, "version": None}))
    assert lines[0] == "run maths, nothing is published"
    assert next(hosts.describe({**make_status(), "run": ""})) == "no run yet"
    assert len(lines) == 5
    assert [line.startswith("(own host)") for line in lines].count(True) == 1


def test_the_sidecar_is_asked_with_the_folders_address_and_token(tmp_path, monkeypatch, capsys):
    asked = []

    class Client:
        def __init__(self, *arguments: Any) -> None:
            asked.append(arguments)

        def __enter__(self) -> "Client":
            return self

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None: ...

        def status(self) -> dict[str, Any]:
            return make_status()

    monkeypatch.setattr(hosts, "RolloutClient", Client)
    with pytest.raises(InputError, match="no sidecar serves .*which has no file address"):
        hosts.main([str(tmp_path)])
    run = tmp_path / "run"
    run.mkdir()
    (run / "address").write_text("http://127.0.0.1:1\n")
    (run / "token").touch(mode=0o600)
    (run / "token").write_text("secret\n")
    assert hosts.main([str(tmp_path)]) == 0
    assert asked[0][:2] == ("http://127.0.0.1:1", "secret")
    assert "(own host)" in capsys.readouterr().out
    places = RankPlaces(run)
    places.note(0, "here", 1, "train")
    places.write()
    assert hosts.main([str(tmp_path)]) == 0
    assert "here           0      train 0 s" in capsys.readouterr().out


def test_ranks_stand_beside_their_host_with_what_they_do():
    of_ranks = [RankPlace("a", "train", 3.2), RankPlace("a", "train", 4.4), RankPlace("a", "wait", 2.0)]
    of_ranks += [RankPlace("b", "update", 0.0)] * 2 + [RankPlace("a", "train", 1.0)]
    assert list(hosts.describe_ranks(ReadPlaces(dict(enumerate(of_ranks)), 1.0))) == [
        "",
        "host of ranks  ranks   part of the iteration",
        "a              0-2, 5  train 4 s (0-1, 5), wait 2 s (2)",
        "b              3-4     update 0 s",
    ]
    (*_, last) = hosts.describe_ranks(ReadPlaces({0: of_ranks[0]}, 61.0))
    assert last == "rank 0 has not reported what ranks do for 61 s: it is stopped, or the run has ended"
    assert list(hosts.describe_ranks(None)) == []


def test_places_are_read_as_they_were_noted_with_the_seconds_since_the_last_step(tmp_path):
    clock = Clock()
    places = RankPlaces(tmp_path, clock)
    assert read_places(tmp_path) is None
    for rank, step in ((1, 7), (0, 7)):
        places.note(rank, f"host-{rank}", step, "train")
    clock.seconds = 5.0
    places.note(0, "host-0", 7, "train")
    places.note(1, "host-1", 8, "train")
    clock.seconds = 6.0
    places.write()
    found = read_places(tmp_path)
    assert found is not None
    assert found.ranks == {0: RankPlace("host-0", "train", 6.0), 1: RankPlace("host-1", "train", 1.0)}
    # A folder that is gone ends no run.
    RankPlaces(tmp_path / "none").write()
    (tmp_path / "ranks.json").write_text("[")
    with pytest.raises(InputError, match="ranks.json cannot be read"):
        read_places(tmp_path)
    places.remove()
    assert read_places(tmp_path) is None


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_two_folders_are_one_too_many():
    with pytest.raises(UsageError, match="b is one folder too many"):
        hosts.main(["a", "b"])
