"""The command megatron-rl hosts."""

import asyncio
from types import TracebackType
from typing import Any

import pytest

from megatron_rl.commands import hosts
from megatron_rl.errors import InputError, UsageError
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
    (tmp_path / "address").write_text("http://127.0.0.1:1\n")
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_text("secret\n")
    assert hosts.main([str(tmp_path)]) == 0
    assert asked[0][:2] == ("http://127.0.0.1:1", "secret")
    assert "(own host)" in capsys.readouterr().out


def test_two_folders_are_one_too_many():
    with pytest.raises(UsageError, match="b is one folder too many"):
        hosts.main(["a", "b"])
