"""`make gpu-bench`: its parts leave each other alone, its page says what is missing, and its arithmetic is right."""

import dataclasses
import functools
import json
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks import gpu_bench, gpu_times
from benchmarks.gpu import attention, engine, kernels, page, publish, schedules, step, turns
from benchmarks.gpu.page import Circumstances, Outcome
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.step import Shape
from benchmarks.gpu.tables import TABLES, Row, append_row, read_rows
from benchmarks.gpu.work import Work
from benchmarks.gpu_bench import Gpu, find_reason, run_all, run_part
from benchmarks.gpu_times import Times
from benchmarks.kernels.registry import list_timed
from benchmarks.overlap import Iteration
from megatron_rl import platforms
from megatron_rl.observe.trace import SERVICE, Span
from megatron_rl.ops.shared_prompt.measured import read_times
from megatron_rl.platforms import Platform
from megatron_rl.shared.weights.families import derive_config
from megatron_rl.sidecar import settings as sidecar_settings
from megatron_rl.sidecar.vllm.flags import split_flags
from tests.processes import run_python

pytestmark = pytest.mark.each_change

H100 = Gpu("an H100", 79.0)


def test_all_parts_together_have_ten_minutes_and_add_to_every_table() -> None:
    assert sum(part.seconds for part in PARTS.values()) <= 600
    assert all(part.least <= part.seconds for part in PARTS.values())
    assert {table for part in PARTS.values() for table in part.tables} == set(TABLES)


def test_a_part_without_its_packages_memory_or_time_is_left_out_with_the_reason() -> None:
    part = Part("step", ("step",), 30, 20, ("torch", "vllm", "megatron"), gib=60)
    assert find_reason(part, H100, 30, False, lambda name: True) == ""
    reason = find_reason(part, H100, 30, False, lambda name: name == "torch")
    assert reason.startswith("vllm, megatron cannot be imported: ")
    assert "make gpu-bench" in reason
    small = Gpu("a small one", 24)
    assert "60 GiB of memory, and this one has 24" in find_reason(part, small, 30, False, lambda name: True)
    assert find_reason(part, small, 30, True, lambda name: True) == ""
    assert "19 s are left, and it needs 20" in find_reason(part, H100, 19, False, lambda name: True)


def test_the_seconds_that_a_part_leaves_are_the_later_ones_and_the_whole_has_an_end(monkeypatch, tmp_path) -> None:
    now, given = [1000.0], {}

    def run(name: str, folder: Path, seconds: float, is_tiny: bool) -> Outcome:
        given[name] = seconds
        now[0] += 40
        return Outcome(name, "complete", "")

    monkeypatch.setattr(gpu_bench, "run_part", run)
    chosen = {name: Part("x", (), 100, 1) for name in ("first", "second")} | {"third": Part("x", (), 900, 1)}
    outcomes = run_all(chosen, tmp_path, H100, 10, False, lambda: now[0])
    assert [(outcome.state, outcome.seconds) for outcome in outcomes] == [("complete", 40)] * 3
    assert given == {"first": 100, "second": 160, "third": 600 - 80}
    *_, last = run_all(chosen, tmp_path, H100, 1, False, lambda: now[0])
    assert last.reason.startswith("out of time: 0 s are left")
    assert given["first"] == 10
    # A part that took longer leaves nothing to the others.
    assert given["second"] == 10


# A part that measures one row and then starts a process and hangs, or fails.
HANGS = """
import subprocess, sys, time
from pathlib import Path
from benchmarks.gpu.tables import Row, append_row
append_row(Path({rows!r}), Row("publish", "0.6b", {{"seconds": 0.5}}))
Path({child!r}).write_text(str(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid))
time.sleep(600)
"""


def test_a_part_that_is_over_its_time_is_ended_with_what_it_started_and_keeps_its_rows(monkeypatch, tmp_path) -> None:
    rows, child = gpu_bench.find_rows(tmp_path, "publish_8b"), tmp_path / "child"
    code = HANGS.format(rows=str(rows), child=str(child))
    monkeypatch.setattr(gpu_bench, "make_command", lambda *_: [sys.executable, "-c", code])
    monkeypatch.setattr(gpu_bench, "await_end", lambda process, seconds: _until(child.exists, None))
    outcome = run_part("publish_8b", tmp_path, 1.0, True)
    assert outcome.state == "cut short"
    assert read_rows(rows) == [Row("publish", "0.6b", {"seconds": 0.5})]
    _until(lambda: not psutil.pid_exists(int(child.read_text())), None)


def _until(is_so, result):
    """Wait for an event, with a deadline far away."""
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return result


def test_a_part_that_fails_says_its_last_words(monkeypatch, tmp_path) -> None:
    code = "print('x'); raise RuntimeError('the kernel is wrong')"
    monkeypatch.setattr(gpu_bench, "make_command", lambda *_: [sys.executable, "-c", code])
    outcome = run_part("attention", tmp_path, 100, True)
    assert outcome.state == "failed"
    assert outcome.is_failure
    assert outcome.reason.endswith("RuntimeError: the kernel is wrong")


def test_a_machine_without_a_gpu_is_told_what_to_do(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_bench.main(["--folder", str(tmp_path / "x")]) == 3
    assert "no CUDA device here: run this on a machine with a GPU" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_kernels_alone_are_measured_with_torch_and_numpy(tmp_path) -> None:
    code = f"""
        import sys
        for package in ("megatron", "msgspec", "pytest", "hypothesis", "triton", "vllm", "transformers", "matplotlib"):
            sys.modules[package] = None
        from benchmarks import gpu_bench
        from benchmarks.gpu import run_part
        for name in ("attention", "output_layer"):
            sys.argv = ["x", name, "--rows", {str(tmp_path / "rows")!r}, "--folder", {str(tmp_path / "work")!r}]
            sys.argv += ["--seconds", "100", "--tiny"]
            run_part.main()
    """
    run_python(code)
    rows = read_rows(tmp_path / "rows")
    assert {row.table for row in rows} == {"attention", "output_layer"}
    assert all(set(row.figures) == set(TABLES[row.table].figures) for row in rows)
    assert all(figure >= 0 for row in rows for figure in row.figures.values())
    times = read_times(tmp_path / attention.FILE)
    assert [one.shape.num_responses for one in times] == [2, 3]
    assert all(one.milliseconds.keys() == {"merge", "gather"} for one in times)


def test_kernels_beside_attention_and_their_launches_are_measured_in_the_interpreter(tmp_path) -> None:
    code = f"""
        import sys
        for package in ("megatron", "msgspec", "pytest", "hypothesis", "vllm", "transformers", "matplotlib"):
            sys.modules[package] = None
        from benchmarks.gpu import run_part
        sys.argv = ["x", "kernels", "--rows", {str(tmp_path / "rows")!r}, "--folder", {str(tmp_path / "work")!r}]
        sys.argv += ["--seconds", "100", "--tiny"]
        run_part.main()
    """
    run_python(code)
    rows = read_rows(tmp_path / "rows")
    assert all(set(row.figures) == set(TABLES[row.table].figures) for row in rows)
    assert all(figure > 0 for row in rows for figure in row.figures.values())
    names = [row.name.split(",")[0] for row in rows]
    assert names == [
        "swiglu_kernel", "add_norm_gradient_kernel", "SwiGLU", "SwiGLU of experts", "residual with norm", "heads",
        "linear layer", "sampled tokens", "AdamW", "digests of slices", "packs of slices",
    ]  # fmt: skip
    # The interpreter's launches take Triton's way.
    assert [row.note for row in rows[:2]] == ["no launch is kept here"] * 2


@pytest.mark.parametrize(
    ("name", "num_bytes"), [("SwiGLU", (6, 10)), ("residual with norm", (8, 8)), ("heads", (4, 6))]
)
def test_the_bytes_of_a_kernel_are_those_of_its_operands_and_results(name: str, num_bytes: tuple[int, int]) -> None:
    """Take bytes for each number of a gate, of a hidden state, or of the product of queries, keys and values."""
    computation = next(one for one in list_timed("cuda") if one.name.startswith(name))
    numbers = {"SwiGLU": 8704 * 3072, "residual with norm": 8704 * 1024, "heads": 8704 * 32 * 128}[name]
    assert computation.num_bytes == tuple(each * numbers for each in num_bytes)


def test_a_row_of_a_kernel_has_its_speed_beside_that_of_a_copy(monkeypatch, tmp_path) -> None:
    times = {"ours": Times(1.0, 3.0), "plain": Times(4.0, 8.0), "copy": Times(0.5, 1.5)}
    monkeypatch.setattr(gpu_times, "take_turns", lambda makers, device, seconds: {name: times[name] for name in makers})
    work = Work(tmp_path / "rows", tmp_path, "", True, time.monotonic() + 100)
    kernels.add_row(work, "one", {"ours": lambda: None, "plain": lambda: None}, (6_000_000, 2_000_000))
    (row,) = read_rows(work.rows)
    assert row.figures == {
        "ours": 4.0, "plain": 12.0, "speedup": 3.0, "gbps": 2.0, "copy_gbps": 4.0, "over_copy": 2.0,
    }  # fmt: skip


def test_a_row_beyond_the_memory_is_left_out_and_the_next_one_is_measured(tmp_path) -> None:
    work = Work(tmp_path / "rows", tmp_path, "0.6b", True, time.monotonic() + 100)
    with work.spared("step", "large"):
        raise torch.OutOfMemoryError("tried to allocate 50 GiB")
    with work.spared("step", "small"):
        work.add("step", "small", ours=1.0)
    large, small = read_rows(work.rows)
    assert large == Row("step", "large", {}, "out of memory: tried to allocate 50 GiB")
    assert small.figures == {"ours": 1.0}


def test_a_row_without_time_is_left_out_by_name(tmp_path) -> None:
    work = Work(tmp_path / "rows", tmp_path, "0.6b", True, time.monotonic() + 3)
    assert not work.has_time("step", "a shape", 12)
    assert read_rows(work.rows) == [Row("step", "a shape", {}, "out of time")]


def test_turns_measure_at_least_one_round_and_end_when_time_does() -> None:
    calls = []
    acts = {name: lambda name=name: calls.append(name) for name in "ab"}
    found = turns.take_turns(acts, platforms.select("cpu"), 5, lambda: False)
    assert calls == ["a", "b", "a", "b"]
    assert set(found) == {"a", "b"}
    calls.clear()
    turns.take_turns(acts, platforms.select("cpu"), 3, lambda: True)
    assert calls == ["a", "b"] * 4


def test_a_step_whose_slots_have_more_groups_than_a_micro_batch_is_refused() -> None:
    shape = Shape(16, 8, 2, num_groups=4)
    step.check_count(shape, 64)
    with pytest.raises(RuntimeError, match="must train on 64 response tokens, and trained on 256"):
        # Each of four slots has all four groups.
        step.check_count(shape, 4 * 64)


@pytest.mark.parametrize("size", step.SHAPES)
def test_the_micro_batches_of_a_shape_divide_its_groups(size) -> None:
    for shape in step.SHAPES[size]:
        assert shape.num_groups % shape.groups_at_once == 0


def test_the_fastest_micro_batch_is_among_those_that_fit(monkeypatch) -> None:
    tried = []

    def time_once(act: functools.partial, platform: Platform) -> float:
        act()
        (sequences,) = act.args
        return 1 / sequences

    monkeypatch.setattr(turns, "time_once", time_once)

    def run(sequences: int) -> None:
        tried.append(sequences)
        if sequences > 8:
            raise torch.OutOfMemoryError("no")

    assert step.find_fastest(run, 32, platforms.select("cpu")) == 8
    assert tried == [4, 4, 8, 16]
    with pytest.raises(torch.OutOfMemoryError, match="does not fit with 4 sequences"):
        step.find_fastest(lambda sequences: run(99), 32, platforms.select("cpu"))


def test_a_sidecar_accepts_the_flags_that_it_is_started_with_on_a_gpu(tmp_path) -> None:
    work = Work(tmp_path / "rows", tmp_path, "8b", False, time.monotonic() + 100)
    (tmp_path / "config.json").write_text(json.dumps(derive_config(work.architecture)))
    words = engine.list_words_of_sidecar(work, tmp_path, 8, 1 << 30, "--enforce-eager")
    settings = sidecar_settings.parse([*words, "--reward", "length:8", "--rollout-folder", str(tmp_path / "run")])
    assert settings.device == "cuda"
    assert settings.rollout.dtype == "bfloat16"
    assert split_flags(settings.rollout.vllm_args)[-3:] == ["--kv-cache-memory-bytes", str(1 << 30), "--enforce-eager"]


def test_weights_without_room_in_shared_memory_are_left_out_with_the_place(monkeypatch, tmp_path) -> None:
    work = Work(tmp_path / "rows", tmp_path, "8b", False, time.monotonic() + 100)
    assert engine.count_bytes(work.architecture) == pytest.approx(16.4e9, rel=0.01)
    monkeypatch.setattr(engine, "find_room", lambda folder: 20 * 10**9)
    assert publish.find_lack(work) == "/dev/shm has 20 GB free, and 36 are needed"


def test_the_parts_of_a_publish_add_up_to_it() -> None:
    moment = publish.Moment(version=3, begin=100.0, end=101.0)
    spans = [
        Span(SERVICE, "publish", 98.0, 98.5, 2),
        Span("engine-0", "load", 98.1, 98.4),
        Span(SERVICE, "publish", 100.25, 100.875, 3),
        *(
            Span("engine-0", name, 100.25 + begin, 100.25 + begin + 0.0625)
            for name, begin in zip(publish.STEPS, (0, 0.0625, 0.125, 0.1875, 0.25), strict=True)
        ),
    ]
    parts = publish.divide(moment, spans)
    assert parts["seconds"] == 1.0
    assert parts["announce"] == 0.25
    assert parts["load"] == 0.0625
    assert sum(parts.values()) - parts["seconds"] == pytest.approx(1.0)
    assert parts["other"] == pytest.approx(0.4375)


def test_the_lines_of_a_start_are_read_as_a_run_prints_them(tmp_path) -> None:
    from megatron_rl.observe.startup import Startup

    times = iter([0.0, 8.8, 92.25])
    startup = Startup(clock=lambda: next(times))
    with (tmp_path / "out").open("w") as file:
        startup.show(file)
        startup.say("sidecar: started, its log is /runs/one/sidecar.log")
        startup.say("all is ready")
    said = schedules.find_said((tmp_path / "out").read_text() + "iteration 1 of 4\n", Path("/runs/one"))
    assert said == [
        schedules.Said(8.8, "sidecar: started, its log is RUN/sidecar.log"),
        schedules.Said(92.2, "all is ready"),
    ]


def test_schedules_are_compared_for_the_same_number_of_tokens(tmp_path) -> None:
    work = Work(tmp_path / "rows", tmp_path, "0.6b", True, time.monotonic() + 100)
    sync = Iteration(True, whole=10, publish=1, first=1, generate=6, tail=0, train=3, tokens=100)
    periodic = dataclasses.replace(sync, is_sync=False, whole=14, tokens=200)
    schedules.add_row(work, schedules.TINY, schedules.Run([sync, periodic], 0.0))
    (row,) = read_rows(work.rows)
    assert row.figures == pytest.approx(
        {"balance": 2.0, "sync": 10.0, "periodic": 7.0, "ratio": 0.7, "over_ideal": 0.7 / (6 / 9)}
    )


ROWS = [
    Row("step", "0.6b, 512/1024/8 x 4, 1", {"ours": 40000.0, "theirs": 32000.0, "vs_transformers": 1.25}),
    Row("step", "4b, 2048/1024/8 x 1, 1", {}, "out of memory"),
    Row("publish", "0.6b", {"seconds": 1.0, **dict.fromkeys(page.PUBLISH_PARTS, 0.125)}),
    Row("start", "sidecar: started", {"at": 8.0}),
    Row("start", "engines: 0 ready", {"at": 80.0}),
]
OUTCOMES = [
    Outcome("step_0.6b", "complete", "", 60),
    Outcome("publish_8b", "left out", "vllm cannot be imported", 0),
]


def test_the_page_has_figures_and_the_reason_of_each_that_is_left_out(tmp_path) -> None:
    written = page.write(tmp_path, Circumstances("an H100", "torch 2.13", "a host"), OUTCOMES, ROWS)
    text = written.read_text()
    for words in (
        "in 1.0 minutes on an H100",
        "| 0.6b, 512/1024/8 x 4, 1 | 40,000 | 32,000 | 1.25 |",
        "| 4b, 2048/1024/8 x 1, 1 |  |  |  | out of memory |",
        "- `vs_transformers`: ours / transformers, tokens a second",
        "| publish_8b | left out | 0 | vllm cannot be imported |",
        "(results-gpu.svg)",
    ):
        assert words in text, words
    assert "`tflops`" not in text
    picture = (tmp_path / "results-gpu.svg").read_text()
    assert "step 0.6b, 512/1024/8 x 4, 1: ours / transformers" in picture
    assert "publish, 0.6b: 1.00 s" in picture


def test_the_page_without_matplotlib_says_so(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text = page.write(tmp_path, Circumstances("an H100", "", ""), OUTCOMES, ROWS).read_text()
    assert "matplotlib is missing" in text


def test_the_picture_divides_a_start_by_its_moments() -> None:
    stacks = dict(page.divide_seconds(ROWS))
    assert stacks["start: 80.0 s"] == [("sidecar", pytest.approx(0.1)), ("engines", pytest.approx(0.9))]
    assert sum(share for _, share in stacks["publish, 0.6b: 1.00 s"]) == pytest.approx(1.0)


def test_rows_are_read_back_as_they_were_written(tmp_path) -> None:
    for row in ROWS:
        append_row(tmp_path / "rows", row)
    assert read_rows(tmp_path / "rows") == ROWS
    assert json.loads((tmp_path / "rows").read_text().splitlines()[0])["table"] == "step"
    assert read_rows(tmp_path / "none") == []
