"""The backend of attention that follows from measured times, and what is said of it."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl import platforms
from megatron_rl.command_line.backends import choose_blocks
from megatron_rl.config.settings import AttentionConfig
from megatron_rl.errors import PlatformError, UsageError
from megatron_rl.ops.backends import Conditions
from megatron_rl.ops.shared_prompt import choose_backend
from megatron_rl.ops.shared_prompt.measured import GroupShape, Measured, find_nearest_measured, read_times, write_times
from megatron_rl.trainer.loop.run import check_same_attention
from megatron_rl.trainer.loop.saver import compare_rounding, describe_rounding
from megatron_rl.trainer.loop.settling import settle_backend, settle_blocks
from tests.command_lines import CPU, QWEN3, RUN, folder, keep_one_parser, parse_run
from tests.documents import read

CHIP = "NVIDIA H200"
SHAPE = GroupShape(512, 1024, 16, 32, 8, 128)
BLOCKS, OTHER_BLOCKS = "128x64x8x3,128x64x8x2,32x128x8x2", "64x64x4x3,64x64x4x2,64x64x4x2"


def measure(shape: GroupShape = SHAPE, chip: str = CHIP, **milliseconds: float) -> Measured:
    return Measured(chip, shape, milliseconds)


def resize(**sizes: int) -> GroupShape:
    return dataclasses.replace(SHAPE, **sizes)


def test_the_times_of_the_package_are_those_of_the_documents() -> None:
    section = read("docs/kernels.md").split("## On one H200")[1]
    header, *rows = re.findall(r"^\| (\S+/.*) \|$", section, re.MULTILINE)
    names = header.split(" | ")[3:]
    shown = []
    for row in rows[:6]:
        *_, responses = row.split(" | ")[0].split("/")
        times = [sum(map(float, cell.split(" + "))) for cell in row.split(" | ")[3:]]
        shown.append((int(responses), {name: round(time, 2) for name, time in zip(names, times, strict=True)}))
    shipped = read_times()
    assert [(one.shape.num_responses, one.milliseconds) for one in shipped] == shown
    assert {(one.chip, one.shape.num_heads, one.shape.num_groups, one.shape.head_dim) for one in shipped} == {
        (CHIP, 32, 8, 128)
    }
    lengths = [f"{one.shape.prompt}/{one.shape.response}" for one in shipped[:5]]
    assert lengths == [row.split(" | ")[0].rpartition("/")[0] for row in rows[:5]]


@pytest.mark.parametrize(
    ("shape", "nearest"),
    [
        (SHAPE, 0),
        (resize(prompt=700, response=1500), 0),
        (resize(prompt=3000, num_responses=8), 1),
        (resize(prompt=2000, response=1024), 1),
        # Further than a factor of four from either, in one size alone.
        (resize(response=255), None),
        (resize(num_responses=65), None),
        (resize(num_heads=4, num_groups=1), None),
        (resize(head_dim=64), None),
        (resize(num_groups=32), 0),
        (resize(num_groups=1), None),
    ],
)
def test_the_nearest_measurement_counts_if_it_is_near_enough(shape: GroupShape, nearest: int | None) -> None:
    times = [measure(triton=1.0), measure(resize(prompt=4096), triton=2.0), measure(chip="another", triton=3.0)]
    found = find_nearest_measured(CHIP, shape, times)
    assert found is (None if nearest is None else times[nearest])
    assert find_nearest_measured("a third", shape, times) is None


def test_auto_takes_the_fastest_of_a_measurement_that_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    conditions = Conditions("cuda", torch.bfloat16)
    near = measure(merge=3.0, gone=0.1, gather=2.0, cudnn=1.0, triton=4.0)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    choice = choose_backend("auto", conditions, near)
    assert choice.name == "cudnn"
    (note,) = choice.notes
    assert note == (
        "--shared-prompt-backend auto takes cudnn; the nearest measured group is 512/1024/16 with 32/8 heads of 128 on "
        "NVIDIA H200"
    )
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    choice = choose_backend("auto", conditions, near)
    assert choice.name == "gather"
    assert "auto takes gather; not cudnn: this torch has no cuDNN; the nearest" in choice.notes[0]
    assert choose_backend("merge", conditions, near).name == "merge"
    # What is not measured comes in the general order.
    choice = choose_backend("auto", conditions, measure(cudnn=1.0))
    assert choice.name == "triton"
    assert "nearest" not in choice.notes[0]


def test_a_file_of_times_is_read_as_it_was_written(tmp_path: Path) -> None:
    times = [
        dataclasses.replace(measure(triton=1.25, merge=2.5), blocks=BLOCKS),
        measure(resize(prompt=77), "a chip", gather=0.5),
    ]
    write_times(times, tmp_path / "times")
    assert read_times(tmp_path / "times") == times


@pytest.mark.parametrize(
    "spoil",
    [
        lambda entry: entry.pop("chip"),
        lambda entry: entry.update(prompt=0),
        lambda entry: entry.update(prompt="long"),
        lambda entry: entry.update(tiles=3),
        lambda entry: entry.update(blocks=3),
        lambda entry: entry["milliseconds"].update(merge=float("nan")),
        lambda entry: entry["milliseconds"].update(merge=-1),
        lambda entry: entry.update(milliseconds=[1]),
    ],
)
def test_a_file_with_other_entries_is_an_error_with_its_name(spoil: Any, tmp_path: Path) -> None:
    file = tmp_path / "times"
    write_times([measure(triton=1.0, merge=2.0)], file)
    entries = json.loads(file.read_text())
    spoil(entries[0])
    file.write_text(json.dumps(entries))
    with pytest.raises(UsageError, match="--shared-prompt-times .*times must be a list of measured times as `make gpu"):
        read_times(file)
    for text in ("{}[", '{"chip": 1}', "[3]"):
        file.write_text(text)
        with pytest.raises(UsageError, match="must be a list"):
            read_times(file)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_times(tmp_path / "missing")


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the flags of a run with groups of 64 and 64 tokens and 8 responses, on devices with a name."""
    keep_one_parser(monkeypatch)
    monkeypatch.setattr(type(platforms.select("cpu")), "device_name", lambda self: "a chip")
    return [*CPU, "--hf-model", folder(tmp_path, QWEN3), *RUN]


def test_a_run_takes_what_was_fastest_on_its_devices_and_says_so(words: list[str], tmp_path: Path) -> None:
    shape = GroupShape(64, 64, 8, 8, 4, 32)
    file = tmp_path / "times"
    flag = f"--shared-prompt-times {file}"
    write_times([measure(shape, "a chip", gather=1.0, merge=2.0)], file)
    settings = parse_run(*words, "--bf16", flag)
    assert settings.attention.backend == "gather"
    (note,) = [note for note in settings.notes if note.startswith("--shared-prompt-backend")]
    assert note.endswith("the nearest measured group is 64/64/8 with 8/4 heads of 32 on a chip")
    assert parse_run(*words, "--bf16").attention.backend == "merge"
    # Times were measured in half precision, with groups, and for the heads of a rank.
    for other in ("", "--bf16 --no-shared-prompt", "--bf16 --shared-prompt-backend merge"):
        assert parse_run(*words, other, flag).attention.backend == "merge", other
    write_times([measure(dataclasses.replace(shape, num_heads=1, num_groups=1), "a chip", gather=1.0)], file)
    assert parse_run(*words, "--bf16", flag).attention.backend == "merge"
    two = "--tensor-model-parallel-size 2"
    assert parse_run(*words, "--bf16", flag, two, world_size=2).attention.backend == "gather"
    file.write_text("{}[")
    with pytest.raises(UsageError, match="must be a list of measured times"):
        parse_run(*words, flag)


def test_ranks_that_would_compute_in_other_ways_end_by_name() -> None:
    one, another = AttentionConfig(backend="triton", blocks="chip"), AttentionConfig(backend="triton", blocks=BLOCKS)
    check_same_attention([one, one])
    with pytest.raises(UsageError, match=f"--shared-prompt-blocks {BLOCKS}; .*--shared-prompt-blocks chip: write one"):
        check_same_attention([one, another, one])
    with pytest.raises(UsageError, match="--shared-prompt-backend cudnn .*; --shared-prompt-backend triton .*: write"):
        check_same_attention([dataclasses.replace(one, backend="cudnn"), one])


def test_a_run_that_resumes_with_another_backend_or_other_blocks_says_so(words: list[str]) -> None:
    merge, gather, blocks = (
        describe_rounding(parse_run(*words, flags))
        for flags in (
            "--shared-prompt-backend merge",
            "--shared-prompt-backend gather",
            f"--shared-prompt-backend merge --shared-prompt-blocks {BLOCKS}",
        )
    )
    (note,) = compare_rounding(merge, gather)
    assert note.startswith("attention was computed with --shared-prompt-backend merge before, and is with gather")
    (note,) = compare_rounding(blocks, merge)
    assert note.startswith(f"attention was computed with --shared-prompt-blocks {BLOCKS} before, and is with chip")


def test_measured_blocks_are_taken_where_triton_may_compute(words: list[str]) -> None:
    settings = parse_run(*words)
    assert settings.attention.blocks == "chip"

    def choose(backend: str, blocks: str = "auto", near: Measured | None = None) -> tuple[str, tuple[str, ...]]:
        changed = dataclasses.replace(
            settings,
            attention=AttentionConfig(backend=backend, blocks=blocks),
            notes=(),  # type: ignore[arg-type]
        )
        chosen = choose_blocks(changed, near)
        return chosen.attention.blocks, chosen.notes

    near = dataclasses.replace(measure(triton=1.0), blocks=BLOCKS)
    for backend in ("triton", "cudnn"):
        blocks, (note,) = choose(backend, near=near)
        assert blocks == BLOCKS
        assert note.startswith(f"--shared-prompt-blocks auto takes {BLOCKS}, measured for 512/1024/16 with")
    assert choose("merge", near=near) == ("chip", ())
    assert choose("triton", near=measure(triton=1.0)) == ("chip", ())
    assert choose("triton", "chip", near) == ("chip", ())
    assert choose("triton", OTHER_BLOCKS, near) == (OTHER_BLOCKS, ())


@dataclasses.dataclass(frozen=True)
class StandIn:
    """The settings that the trial reads."""

    attention: AttentionConfig
    sources: dict[str, str]
    architecture: Any
    transformer: Any


def settle(
    attention: AttentionConfig, sources: dict[str, str], can_run: Callable[[AttentionConfig], bool]
) -> tuple[AttentionConfig, list[str]]:
    """Return what is left after the trials, which end as `can_run` says, and what was said."""
    session: Any = SimpleNamespace(
        device=torch.device("cuda"), gather_or_raise_everywhere=lambda find_fault: [find_fault()]
    )
    settings: Any = StandIn(attention, sources, mock.Mock(), mock.Mock())
    said: list[str] = []

    def try_backend(target: str, settings: Any, session: Any) -> None:
        if not can_run(settings.attention):
            raise PlatformError("no plan")

    with mock.patch("megatron_rl.trainer.loop.settling.try_backend", try_backend):
        settings = settle_blocks(settings, session, said.append)
        return settle_backend("attention.backend", settings, session, said.append).attention, said


def test_auto_leaves_cudnn_for_triton_if_its_trial_fails_and_a_named_one_is_an_error() -> None:
    cudnn, triton, merge = (AttentionConfig(backend=name, blocks="chip") for name in ("cudnn", "triton", "merge"))
    auto = {"attention.backend": "--shared-prompt-backend auto takes cudnn; the nearest"}
    line = "--shared-prompt-backend auto takes triton after a trial: no plan"
    assert settle(cudnn, auto, lambda one: True) == (cudnn, [])
    assert settle(cudnn, auto, lambda one: one.backend != "cudnn") == (triton, [line])
    line = "--shared-prompt-backend auto takes merge after a trial: no plan; no plan; no plan"
    assert settle(cudnn, auto, lambda one: one.backend == "merge") == (merge, [line])
    with pytest.raises(PlatformError, match="every choice fails its trial: no plan; no plan"):
        settle(merge, auto, lambda one: False)
    with pytest.raises(PlatformError, match="no plan"):
        settle(cudnn, {"attention.backend": "--shared-prompt-backend cudnn"}, lambda one: False)
