"""A sidecar that a trainer starts waits for rows on which it tries its rewards; another one does not."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.settings import RewardConfig, RolloutConfig
from megatron_rl.shared.protocol.wire import Prompt
from megatron_rl.sidecar import parent
from megatron_rl.sidecar.main import _start_rewards
from megatron_rl.sidecar.settings import SidecarSettings
from megatron_rl.sidecar.starting import TRIALS_FILE, write_trials


class Pool:
    """Rewards that note what is asked of them."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def start(self) -> None:
        self.calls.append("start")

    async def try_on(self, trials: Sequence[Any]) -> None:
        self.calls.append([trial.row for trial in trials])


def settings_of(folder: Path, tries_rewards: bool) -> SidecarSettings:
    return SidecarSettings(
        platform="cpu",
        hf_model=None,
        seq_length=None,
        rollout=RolloutConfig(folder=folder, engine="scripted"),
        reward=RewardConfig(functions=["length:8"]),
        tries_rewards=tries_rewards,
    )


def test_rewards_are_ready_only_when_they_were_tried_on_the_rows_of_the_trainer(tmp_path, monkeypatch):
    monkeypatch.setenv(parent.VARIABLE, "1")
    pool = Pool()

    async def run() -> None:
        starting = asyncio.create_task(_start_rewards(pool, settings_of(tmp_path, tries_rewards=True)))
        await asyncio.sleep(0.2)
        assert pool.calls == ["start"]
        assert not starting.done()
        write_trials(tmp_path / TRIALS_FILE, [Prompt(index=0, row="file:1", tokens=b"")])
        await starting

    asyncio.run(run())
    assert pool.calls == ["start", ["file:1"]]


@pytest.mark.parametrize(("tries_rewards", "has_parent"), [(False, True), (True, False)])
def test_a_sidecar_that_gets_no_rows_waits_for_none(tries_rewards, has_parent, tmp_path, monkeypatch):
    monkeypatch.delenv(parent.VARIABLE, raising=False)
    if has_parent:
        monkeypatch.setenv(parent.VARIABLE, "1")
    pool = Pool()
    asyncio.run(asyncio.wait_for(_start_rewards(pool, settings_of(tmp_path, tries_rewards)), 60))
    assert pool.calls == ["start"]
