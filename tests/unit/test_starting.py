"""The lines that a run writes while it starts: one for each step, and none twice."""

import io
from types import SimpleNamespace

import torch

from megatron_rl.observe.startup import Startup, describe_model, describe_prompts
from megatron_rl.sidecar.starting import FILE_NAME, News, StartProgress
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


def test_rewards_that_take_long_to_import_are_said_before_there_are_engines(tmp_path):
    news = News(tmp_path / FILE_NAME)
    begun = news._begun
    assert [*news.lines(begun + 16)] == ["rewards: waiting for their processes, 16 s so far"]
    assert [*news.lines(begun + 17)] == []


def test_warnings_of_rewards_are_printed_once_before_engines_start(tmp_path):
    StartProgress(engines={"engine-0": None}, warnings=["--reward f: it failed"]).write(tmp_path / FILE_NAME)
    news = News(tmp_path / FILE_NAME)
    assert [*news.lines(news._begun)] == [
        "rewards: --reward f: it failed", "engines: engine-0 start and load the model",
    ]  # fmt: skip
    assert [*news.lines(news._begun + 1)] == []


def test_many_engines_are_counted_and_not_listed(tmp_path):
    StartProgress(engines={f"engine-{number}": None for number in range(64)}).write(tmp_path / FILE_NAME)
    news = News(tmp_path / FILE_NAME)
    assert [*news.lines(news._begun)] == ["engines: engine-0 and 63 others start and load the model"]
