"""The accelerators that engines get if none are named."""

import dataclasses
from pathlib import Path

import pytest

from megatron_rl.config import hardware
from megatron_rl.errors import UsageError
from megatron_rl.sidecar import settings as sidecar_settings
from megatron_rl.sidecar.settings import parse
from tests import hf_models

WORDS = "--rollout-folder /nowhere/run --reward exact --seq-length 64"
VISIBLE = [("cuda", "CUDA_VISIBLE_DEVICES"), ("npu", "ASCEND_RT_VISIBLE_DEVICES")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.draw("qwen3", tmp_path_factory.mktemp("models") / "qwen3")


@pytest.mark.parametrize(
    ("said", "visible"),
    [
        ("4,5", ["4", "5"]),
        ("GPU-a, MIG-b", ["GPU-a", "MIG-b"]),
        ("", []),
        ("0,-1,2", ["0"]),
        ("NoDevFiles,,1", ["NoDevFiles"]),
    ],
)
@pytest.mark.parametrize(("kind", "variable"), VISIBLE)
def test_the_environment_says_what_is_visible(
    kind: hardware.Kind, variable: str, said: str, visible: list[str]
) -> None:
    assert hardware.list_visible_devices(kind, {variable: said}) == visible


def test_without_the_variable_all_of_the_host_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"npu": ["/dev/davinci0", "/dev/davinci3"], "cuda": []}
    monkeypatch.setattr(hardware, "list_files", files.get)
    assert hardware.list_visible_devices("npu", {}) == ["0", "1"]
    assert hardware.list_visible_devices("cuda", {}) == []
    assert sidecar_settings.detect_device() == "npu"


@pytest.mark.parametrize(("kind", "variable"), VISIBLE)
def test_several_engines_never_get_the_same_device_nor_a_ranks(
    kind: str, variable: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "8,9,10,11,12,13")
    words = f"{WORDS} --hf-model {model} --platform {kind} --rollout-num-engines 2 --rollout-tensor-parallel-size 2"
    alone = parse(words.split())
    assert alone.rollout.devices == [0, 1, 2, 3]
    given = parse(f"{words} --rollout-devices 5 4 3 2".split())
    assert given.rollout.devices == [5, 4, 3, 2]
    assert sidecar_settings.pick_devices(given, num_ranks=2) == given
    unpicked = dataclasses.replace(alone, rollout=dataclasses.replace(alone.rollout, devices=None))
    beside_two = sidecar_settings.pick_devices(unpicked, num_ranks=2)
    assert beside_two.rollout.devices == [2, 3, 4, 5]
    beside_three = sidecar_settings.pick_devices(unpicked, num_ranks=3)
    assert beside_three.rollout.devices is None
    (said,) = sidecar_settings.problems(beside_three, None)
    assert said.startswith("2 engines of 2 devices are too many: 6 devices are visible here")


def test_a_device_that_is_not_visible_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    words = f"{WORDS} --hf-model {model} --platform cuda"
    with pytest.raises(UsageError, match=r"--rollout-devices 4 must be below 2"):
        parse(f"{words} --rollout-devices 4".split())
    with pytest.raises(UsageError, match=r"3 engines of 1 devices are too many: 2 devices are visible here"):
        parse(f"{words} --rollout-num-engines 3".split())


@pytest.mark.parametrize(
    ("count", "bound"),
    [
        (0, "at least 1 without --rollout-hosts: write 1 or more, or name hosts with engines"),
        (-1, "at least 0: write 0 or more"),
    ],
)
def test_a_run_without_engines_is_an_error_of_its_own(
    count: int, bound: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(UsageError) as raised:
        parse(f"{WORDS} --hf-model {model} --platform cuda --rollout-num-engines {count}".split())
    assert str(raised.value).splitlines() == [f"--rollout-num-engines {count} must be {bound}"]


def test_nothing_is_picked_if_no_device_is_known(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(hardware, "list_files", lambda kind: [])
    assert parse(f"{WORDS} --hf-model {model} --platform cuda --rollout-num-engines 3".split()).rollout.devices is None
