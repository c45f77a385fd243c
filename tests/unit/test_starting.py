"""The lines that a run writes while it starts: one for each step, and none twice."""

import asyncio
import io
from types import SimpleNamespace

import torch

from megatron_rl.observe.startup import Startup, describe_model, describe_prompts
from megatron_rl.shared.protocol.wire import Prompt
from megatron_rl.sidecar.starting import (
    ENGINES,
    FILE_NAME,
    FLAGS,
    REWARDS,
    TOKENIZER,
    TRIALS_FILE,
    News,
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


def test_engines_that_start_are_said_once_when_they_begin_and_once_when_they_are_ready(tmp_path):
    path = tmp_path / FILE_NAME
    news = News(path)
    begun = news._begun
    assert [*news.lines(begun + 1)] == []
    StartProgress(engines={"engine-0": None, "engine-1": None}).write(path)
    assert [*news.lines(begun + 2)] == ["engines: engine-0, engine-1 start and load the model"]
    assert [*news.lines(begun + 3)] == []
    StartProgress(engines={"engine-0": None, "engine-1": 12.5}).write(path)
    assert [*news.lines(begun + 14)] == ["engines: engine-1 ready after 12.5 s, 1 of 2"]
    assert [*news.lines(begun + 28)] == []
    (line,) = news.lines(begun + 30)
    assert line.startswith("engines: 1 of 2 ready, waiting for engine-0 (what they print is in ")
    assert [*news.lines(begun + 31)] == []
    StartProgress(engines={"engine-0": 33.0, "engine-1": 12.5}).write(path)
    assert [*news.lines(begun + 34)] == ["engines: engine-0 ready after 33.0 s, 2 of 2"]
    assert [*news.lines(begun + 1000)] == []


def test_a_sidecar_that_writes_nothing_is_said_to_be_waited_for(tmp_path):
    news = News(tmp_path / FILE_NAME)
    begun = news._begun
    assert [*news.lines(begun + 16)] == ["sidecar: waiting for its process, 16 s so far"]
    assert [*news.lines(begun + 17)] == []


def test_rewards_that_take_longer_than_engines_are_said_to_be_waited_for(tmp_path):
    path = tmp_path / FILE_NAME
    StartProgress(engines={"engine-0": 2.0}, parts={REWARDS: None, ENGINES: 2.0, TOKENIZER: None}).write(path)
    news = News(path)
    begun = news._begun
    assert len([*news.lines(begun + 3)]) == 2
    assert [*news.lines(begun + 18)] == ["sidecar: waiting for rewards, tokenizer, 18 s so far"]
    assert [*news.lines(begun + 19)] == []


def test_a_start_that_is_over_is_told_once_by_its_parts_with_those_of_its_slowest_engine(tmp_path):
    path = tmp_path / FILE_NAME
    news = News(path)
    parts = {REWARDS: 1.25, FLAGS: 0.0, ENGINES: 31.0, TOKENIZER: 2.0}
    of_engines = {"engine-0": {"model": 3.0, "graphs": 6.0}, "engine-1": {"model": 4.0, "graphs": 8.5}}
    StartProgress(engines=dict.fromkeys(of_engines, 31.0), parts=parts, engine_parts=of_engines).write(path)
    *_, last = news.lines(news._begun)
    assert last == (
        "sidecar: its parts, side by side: rewards 1.2 s, flags of vLLM 0.0 s, engines 31.0 s, tokenizer 2.0 s; "
        "engine-1: model 4.0 s, graphs 8.5 s"
    )
    assert [*news.lines(news._begun + 1000)] == []


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


def test_each_warning_of_rewards_is_printed_once_whenever_it_comes(tmp_path):
    warnings = ["--reward f: it failed", "--reward g: it failed"]
    StartProgress(engines={"engine-0": None}, warnings=warnings[:1]).write(tmp_path / FILE_NAME)
    news = News(tmp_path / FILE_NAME)
    assert [*news.lines(news._begun)] == [
        "warning: --reward f: it failed", "engines: engine-0 start and load the model",
    ]  # fmt: skip
    assert [*news.lines(news._begun + 1)] == []
    StartProgress(engines={"engine-0": None}, warnings=warnings).write(tmp_path / FILE_NAME)
    assert [*news.lines(news._begun + 2)] == ["warning: --reward g: it failed"]


def test_many_engines_are_counted_and_not_listed(tmp_path):
    StartProgress(engines={f"engine-{number}": None for number in range(64)}).write(tmp_path / FILE_NAME)
    news = News(tmp_path / FILE_NAME)
    assert [*news.lines(news._begun)] == ["engines: engine-0 and 63 others start and load the model"]
