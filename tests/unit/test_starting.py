"""The lines that a run writes while it starts, one for each step, and the parts of a sidecar's start."""

import asyncio
import io
from collections.abc import Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.config.settings import RewardConfig, RolloutConfig
from megatron_rl.errors import UsageError
from megatron_rl.observe.startup import Startup, describe_model, describe_prompts
from megatron_rl.shared.protocol.wire import Prompt
from megatron_rl.sidecar import parent
from megatron_rl.sidecar.main import _start_rewards
from megatron_rl.sidecar.settings import SidecarSettings
from megatron_rl.sidecar.starting import (
    ENGINES,
    FILE_NAME,
    FLAGS,
    REWARDS,
    TOKENIZER,
    TRIALS_FILE,
    News,
    StartNotes,
    StartProgress,
    take_trials,
    write_trials,
)
from megatron_rl.types import Architecture, ParallelSizes

QWEN = Architecture(
    family="qwen3", num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=8, num_query_groups=4,
    kv_channels=16, vocab_size=1000, max_position_embeddings=256, qk_layernorm=True,
)  # fmt: skip


class _Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_line_of_the_start_says_how_long_the_run_has_been_starting():
    clock, stream = _Clock(), io.StringIO()
    startup = Startup(begun=90.0, clock=clock)
    startup.say("this has no reader")
    startup.show(stream)
    startup.say("prompts: 3")
    clock.now = 190.0
    startup.say("all is ready")
    assert stream.getvalue() == "start   10.0 s  prompts: 3\nstart  100.0 s  all is ready\n"
    assert startup.seconds == 100


def test_a_closed_output_does_not_stop_the_start():
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    startup = Startup()
    startup.show(Gone())
    startup.say("one")
    startup.say("two")


def test_prompts_are_counted_as_trained_on_held_out_and_left_out():
    assert describe_prompts(8000, 100, 8123) == "prompts: 8,000 to train on, 100 held out, 23 left out"


def test_the_model_is_described_by_its_size_its_precision_and_its_layout():
    settings = SimpleNamespace(
        architecture=QWEN, parallel_sizes=ParallelSizes(tensor=2, pipeline=2),
        transformer=SimpleNamespace(params_dtype=torch.bfloat16),
    )  # fmt: skip
    assert describe_model(settings, "cpu", 8) == (
        "model: qwen3, 214 thousand parameters in bfloat16, on 8 ranks of cpu: TP 2, PP 2, CP 1, EP 1, DP 2"
    )


BEGUN, ONE = {"engine-0": None, "engine-1": None}, {"engine-0": None, "engine-1": 12.5}
OF_ENGINES = {"engine-0": {"model": 3.0, "graphs": 6.0}, "engine-1": {"model": 4.0, "graphs": 8.5}}
PARTS = {REWARDS: 1.25, FLAGS: 0.0, ENGINES: 31.0, TOKENIZER: 2.0}
WARNINGS = ["--reward f: it failed", "--reward g: it failed"]


@pytest.mark.parametrize(
    "moments",
    [
        [
            (1, None, []),
            (2, StartProgress(engines=BEGUN), ["engines: engine-0, engine-1 start and load the model"]),
            (3, None, []),
            (14, StartProgress(engines=ONE), ["engines: engine-1 ready after 12.5 s, 1 of 2"]),
            (28, None, []),
            (30, None, ["engines: 1 of 2 ready, waiting for engine-0 (what they print is in LOGS)"]),
            (31, None, []),
            (34, StartProgress(engines=ONE | {"engine-0": 33.0}), ["engines: engine-0 ready after 33.0 s, 2 of 2"]),
            (1000, None, []),
        ],
        [(16, None, ["sidecar: waiting for its process, 16 s so far"]), (17, None, [])],
        [
            (
                3,
                StartProgress(engines={"engine-0": 2.0}, parts={REWARDS: None, ENGINES: 2.0, TOKENIZER: None}),
                ["engines: engine-0 start and load the model", "engines: engine-0 ready after 2.0 s, 1 of 1"],
            ),
            (18, None, ["sidecar: waiting for rewards, tokenizer, 18 s so far"]),
            (19, None, []),
        ],
        [
            (
                0,
                StartProgress(engines=dict.fromkeys(OF_ENGINES, 31.0), parts=PARTS, engine_parts=OF_ENGINES),
                [
                    "engines: engine-0, engine-1 start and load the model",
                    "engines: engine-0, engine-1 ready after 31.0 s, 2 of 2",
                    "sidecar: its parts, side by side: rewards 1.2 s, flags of vLLM 0.0 s, engines 31.0 s, tokenizer "
                    "2.0 s; engine-1: model 4.0 s, graphs 8.5 s",
                ],
            ),
            (1000, None, []),
        ],
        [
            (
                0,
                StartProgress(engines={"engine-0": None}, warnings=WARNINGS[:1]),
                ["warning: --reward f: it failed", "engines: engine-0 start and load the model"],
            ),
            (1, None, []),
            (2, StartProgress(engines={"engine-0": None}, warnings=WARNINGS), ["warning: --reward g: it failed"]),
        ],
        [
            (
                0,
                StartProgress(engines={f"engine-{number}": None for number in range(64)}),
                ["engines: engine-0 and 63 others start and load the model"],
            )
        ],
    ],
    ids=[
        "engines are said once when they begin and once when they are ready",
        "a sidecar that writes nothing is waited for",
        "rewards that take longer than engines are waited for",
        "a start that is over is told once by its parts, with those of its slowest engine",
        "each warning of rewards is printed once whenever it comes",
        "many engines are counted and not listed",
    ],
)
def test_the_news_of_a_start_are_told_once_and_silence_is_broken_by_what_is_waited_for(tmp_path, moments):
    """Tell the news at moments in seconds, after the sidecar has written its progress, if it has."""
    news = News(tmp_path / FILE_NAME)
    begun = news._begun
    for seconds, progress, lines in moments:
        if progress is not None:
            progress.write(tmp_path / FILE_NAME)
        logs = str(tmp_path / "logs")
        assert [line.replace(logs, "LOGS") for line in news.lines(begun + seconds)] == lines, seconds


def test_the_parts_of_a_start_follow_one_another_and_short_ones_are_not_shown():
    clock = _Clock()
    startup = Startup(begun=90.0, clock=clock)
    startup.end_part("imports and flags")
    clock.now = 103.5
    startup.end_part("data")
    clock.now = 103.51
    startup.end_part("process groups")
    clock.now = 110.0
    startup.end_part("data")
    assert startup.describe_parts() == "imports and flags 10.0 s, data 10.0 s"


def test_a_sidecar_waits_for_the_rows_that_it_tries_its_rewards_on_and_removes_them(tmp_path):
    path = tmp_path / TRIALS_FILE

    async def take():
        taking = asyncio.create_task(take_trials(path))
        await asyncio.sleep(0.2)
        assert not taking.done()
        write_trials(path, [Prompt(index=7, row="file:3", tokens=b"", columns={"answer": "4"})])
        return await taking

    (request,) = asyncio.run(take())
    assert (request.index, request.row, request.columns, len(request.completions)) == (7, "file:3", {"answer": "4"}, 2)
    assert not path.exists()


NO_FILE = Path("unused")


class Recorded:
    """Actions that end when they are told to, and note how they ended."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.go: dict[str, asyncio.Event] = {}

    async def act(self, name: str, error: Exception | None = None, is_held: bool = False) -> str:
        self.begun.append(name)
        try:
            if is_held:
                await self.go.setdefault(name, asyncio.Event()).wait()
            if error is not None:
                raise error
        finally:
            self.ended.append(name)
        return name.upper()


def test_all_parts_run_at_once_and_their_results_and_seconds_come_by_name():
    recorded, clock = Recorded(), iter((100.0, 101.0, 104.04))
    parts = StartNotes(NO_FILE, clock=lambda: next(clock))

    async def run() -> dict[str, str]:
        running = asyncio.create_task(parts.run({"a": recorded.act("a", is_held=True), "b": recorded.act("b")}))
        while recorded.ended != ["b"]:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert recorded.begun == ["a", "b"]
        assert parts.seconds == {"a": None, "b": 1.0}
        recorded.go["a"].set()
        return await running

    assert asyncio.run(run()) == {"a": "A", "b": "B"}
    assert parts.seconds == {"a": 4.0, "b": 1.0}


def test_of_two_errors_the_first_in_the_order_is_raised_though_it_comes_later():
    recorded = Recorded()
    actions: dict[str, Coroutine[Any, Any, str]] = {
        "rewards": recorded.act("rewards", UsageError("a reward"), is_held=True),
        "engines": recorded.act("engines", ValueError("an engine")),
    }

    async def run() -> None:
        running = asyncio.create_task(StartNotes(NO_FILE).run(actions))
        while recorded.ended != ["engines"]:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        assert not running.done(), "the error of the engines may follow from a mistake in the rewards"
        recorded.go["rewards"].set()
        await running

    with pytest.raises(UsageError, match="a reward"):
        asyncio.run(run())


def test_an_error_is_raised_at_once_if_all_before_it_are_done_and_the_others_end_first():
    recorded = Recorded()
    actions = {
        "rewards": recorded.act("rewards"),
        "flags": recorded.act("flags", UsageError("a flag")),
        "engines": recorded.act("engines", is_held=True),
    }
    with pytest.raises(UsageError, match="a flag"):
        asyncio.run(StartNotes(NO_FILE).run(actions))
    assert recorded.ended == ["rewards", "flags", "engines"]


def test_parts_that_are_cancelled_have_ended_when_the_cancelled_start_ends():
    recorded = Recorded()

    async def run() -> None:
        running = asyncio.create_task(
            StartNotes(NO_FILE).run({name: recorded.act(name, is_held=True) for name in ("a", "b")})
        )
        while len(recorded.go) < 2:
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert sorted(recorded.ended) == ["a", "b"]

    asyncio.run(run())


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
