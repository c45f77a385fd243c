"""The accelerators of engines: those that they get if none are named, and the memory of one that they share."""

import contextlib
import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl import platforms
from megatron_rl.config import hardware
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.errors import ExitCode, UsageError
from megatron_rl.shared.device_memory import (
    GIB,
    EngineMemory,
    EngineNeeds,
    count_needs,
    count_room_beside_sleeper,
    divide,
    take_turns,
)
from megatron_rl.shared.weights.mapping import Mapping
from megatron_rl.sidecar import settings as sidecar_settings
from megatron_rl.sidecar.settings import RewardConfig, SidecarSettings, check_sharing
from megatron_rl.sidecar.temporary import make_socket_folder
from megatron_rl.sidecar.vllm.flags import is_divided_by_user
from megatron_rl.sidecar.vllm.server import ServerConfig, configure_server, make_process_spec
from megatron_rl.trainer.loop import rank_memory
from megatron_rl.trainer.loop import run as loop_run
from megatron_rl.trainer.loop.inputs import Inputs
from megatron_rl.types import Experts
from tests import hf_models
from tests.command_lines import QWEN3, RUN, folder, parse_run
from tests.processes import ROOT

NEEDS = EngineNeeds(weights=2 * GIB, work=4 * GIB, response=GIB // 4, num_responses=64)
ALONE = "--rollout-folder /nowhere/run --reward exact --seq-length 64"
WORDS = f"{ALONE} --platform cuda"
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
    words = f"{ALONE} --hf-model {model} --platform {kind} --rollout-num-engines 2 --rollout-tensor-parallel-size 2"
    alone = sidecar_settings.parse(words.split())
    assert alone.rollout.devices == [0, 1, 2, 3]
    given = sidecar_settings.parse(f"{words} --rollout-devices 5 4 3 2".split())
    assert given.rollout.devices == [5, 4, 3, 2]
    assert sidecar_settings.pick_devices(given, num_ranks=2) == given
    unpicked = dataclasses.replace(alone, rollout=dataclasses.replace(alone.rollout, devices=None))
    beside_two = sidecar_settings.pick_devices(unpicked, num_ranks=2)
    assert beside_two.rollout.devices == [2, 3, 4, 5]
    beside_three = sidecar_settings.pick_devices(unpicked, num_ranks=3)
    assert beside_three.rollout.devices is None
    (said,) = sidecar_settings.problems(beside_three, None)
    assert said.startswith("2 engines of 2 devices are too many: 6 devices are visible here")


@pytest.fixture
def judged(model: Path, tmp_path: Path) -> str:
    """Return the words of a sidecar with a judge and one engine on accelerators."""
    (question := tmp_path / "question.txt").write_text("{response}")
    (model / "tokenizer.json").write_text("{}")
    return f"{WORDS} --hf-model {model} --reward judge:{model} --judge-prompt {question}"


@pytest.mark.parametrize("engine", ["vllm", "scripted"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "--judge-devices is missing: name the judge's accelerators"),
        ("--judge-devices -1 2", "--judge-devices -1 2 must be different numbers, none negative"),
        ("--judge-devices 3 3", "--judge-devices 3 3 must be different numbers, none negative"),
        ("--judge-devices 3 4", "--judge-devices 3 4 must be below 4, the number of devices that are visible here"),
        ("--judge-devices 3 1 --rollout-devices 1", "--judge-devices: engines compute on 1 (--rollout-devices)"),
    ],
)
def test_devices_that_a_judge_cannot_have_are_one_error(
    words: str, said: str, engine: str, judged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,9,10,11")
    with pytest.raises(UsageError) as raised:
        sidecar_settings.parse(f"{judged} {words} --rollout-engine {engine}".split())
    (found,) = raised.value.problems
    assert found.startswith(said)


def test_engines_are_not_given_the_devices_of_a_judge(judged: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,9,10,11")
    words = f"{judged} --judge-devices 2 0"
    assert sidecar_settings.parse(f"{words} --rollout-num-engines 2".split()).rollout.devices == [1, 3]
    with pytest.raises(UsageError, match="and the run's ranks have the first, its judge others. Start fewer"):
        sidecar_settings.parse(f"{words} --rollout-num-engines 3".split())


NO_ENGINES = "must be at least 1 without --rollout-hosts: write 1 or more, or name hosts with engines"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rollout-devices 4", "--rollout-devices 4 must be below 2"),
        ("--rollout-num-engines 3", "3 engines of 1 devices are too many: 2 devices are visible here"),
        ("--rollout-num-engines 0", f"--rollout-num-engines 0 {NO_ENGINES}"),
        ("--rollout-num-engines -1", "--rollout-num-engines -1 must be at least 0: write 0 or more"),
        ("--rollout-colocate", "--rollout-colocate is for the engines that a run starts itself"),
    ],
)
def test_engines_for_which_this_host_has_no_devices_are_one_error(
    words: str, said: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(UsageError) as raised:
        sidecar_settings.parse(f"{WORDS} --hf-model {model} {words}".split())
    (found,) = raised.value.problems
    assert found.startswith(said)


def test_nothing_is_picked_if_no_device_is_known(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(hardware, "list_files", lambda kind: [])
    assert sidecar_settings.parse(f"{WORDS} --hf-model {model} --rollout-num-engines 3".split()).rollout.devices is None


@given(
    device=st.integers(1, 200 * GIB),
    counted=st.integers(0, 100 * GIB),
    weights=st.integers(1, 50 * GIB),
    work=st.integers(1, 10 * GIB),
    response=st.integers(1, 10 * GIB),
    num_responses=st.integers(1, 1024),
)
def test_a_division_never_exceeds_the_device_nor_what_can_be_used_and_holds_one_response(
    device: int, counted: int, weights: int, work: int, response: int, num_responses: int
) -> None:
    needs = EngineNeeds(weights, work, response, num_responses)
    try:
        division = divide(device, counted, needs)
    except UsageError:
        assert counted + weights + work + response > 0.8 * device - 2 * GIB
        return
    assert counted < division.rank
    assert division.rank + division.engine <= device
    assert response <= division.cache <= (num_responses + 1) * response
    assert division.engine <= division.memory.share * device <= division.engine + device / 1000
    assert division.memory.cache_bytes == division.cache


@given(
    device=st.integers(1, 200 * GIB),
    counted=st.integers(0, 100 * GIB),
    weights=st.integers(1, 50 * GIB),
    work=st.integers(1, 10 * GIB),
    response=st.integers(1, 10 * GIB),
)
def test_by_turns_neither_exceeds_the_device_beside_what_the_other_leaves_there(
    device: int, counted: int, weights: int, work: int, response: int
) -> None:
    needs = EngineNeeds(weights, work, response, 64)
    try:
        turns = take_turns(device, counted, needs)
    except UsageError:
        assert max(counted, weights + work + response) > 0.8 * device - 4 * GIB
        return
    assert counted < turns.rank
    # A GiB of a rank's context and one of its libraries; an engine's context and its graphs.
    assert max(turns.rank, turns.engine) + 2 * GIB <= device
    assert response <= turns.cache <= 65 * response
    assert turns.memory.cache_bytes == turns.cache
    assert counted <= count_room_beside_sleeper(device)


def test_by_turns_an_engine_has_the_memory_that_a_rank_would_keep() -> None:
    assert take_turns(40 * GIB, 20 * GIB, NEEDS).describe() == (
        "device memory: 40.0 GiB, by turns 24.0 for a rank (20.0 counted) and 22.2 for an engine: weights 2.0, work "
        "4.0, cache 16.2, which holds all 64 responses at full length"
    )
    assert "holds 35 of 64 responses" in divide(40 * GIB, 20 * GIB, NEEDS).describe()
    with pytest.raises(UsageError, match="--rollout-colocate does not fit a device of 24.0 GiB: a rank needs 24.0"):
        take_turns(24 * GIB, 20 * GIB, NEEDS)


def test_a_cache_beyond_what_all_responses_fill_is_left_to_the_rank() -> None:
    division = divide(141 * GIB, 10 * GIB, NEEDS)
    assert division.cache == 65 * GIB // 4
    assert division.memory == EngineMemory(share=0.158, cache_bytes=65 * GIB // 4)
    assert division.describe() == (
        "device memory: 141.0 GiB, of it 12.5 for a rank (10.0 counted) and 22.2 for an engine: weights 2.0, work 4.0, "
        "cache 16.2, which holds all 64 responses at full length"
    )


def test_a_cache_that_not_all_responses_fit_says_how_many_it_holds() -> None:
    division = divide(24 * GIB, 10 * GIB, NEEDS)
    assert NEEDS.response <= division.cache < 64 * NEEDS.response
    assert "which holds 19 of 64 responses at full length" in division.describe()


def test_a_device_that_is_too_small_is_refused_with_each_part() -> None:
    with pytest.raises(UsageError) as raised:
        divide(16 * GIB, 9 * GIB, NEEDS)
    said = str(raised.value)
    assert said.startswith(
        "--rollout-colocate does not fit a device of 16.0 GiB: a rank needs 11.4 (9.0 counted) and an engine at least "
        "6.2: weights 2.0, work 4.0, 0.2 for one response. Lower "
    )
    assert said.endswith("divide the memory yourself: --rollout-vllm-args='--gpu-memory-utilization 0.3'")


def test_an_engines_needs_follow_from_model_lengths_and_precision() -> None:
    one = count_needs(QWEN3, "bfloat16", 1, 8, 100)
    # Keys and values of 4 layers, 4 heads of 32; lengths are rounded up to 128.
    assert one.response == 2 * 4 * 4 * 32 * 2 * 128
    assert one.num_responses == 8
    tensors = [8 * 32 * 64, 4 * 32 * 64, 4 * 32 * 64, 64 * 8 * 32, 3 * 64 * 128, 2 * 64, 2 * 32]
    assert one.weights == 2 * (4 * sum(tensors) + 2 * 200 * 64 + 64)
    assert count_needs(QWEN3, "float32", 1, 8, 100).response == 2 * one.response
    assert count_needs(QWEN3, "bfloat16", 2, 8, 100).response == one.response // 2
    # With more devices than heads of keys and values, several devices hold the same ones.
    assert count_needs(QWEN3, "bfloat16", 8, 8, 100).response == one.response // 4
    # Rank 9 takes a slot of 16, for each matrix, whatever divides the weights.
    sizes = [sum(spec.shape) for spec in Mapping(QWEN3).manifest() if len(spec.shape) == 2]
    for size in (1, 2):
        with_slots = count_needs(QWEN3, "bfloat16", size, 8, 100, lora_rank=9)
        assert with_slots.weights - count_needs(QWEN3, "bfloat16", size, 8, 100).weights == 2 * 16 * sum(sizes)
    assert count_needs(dataclasses.replace(QWEN3, vocab_size=100_000), "bfloat16", 1, 8, 100).work > one.work


def test_an_engine_has_room_for_the_experts_that_vllm_loads_at_once() -> None:
    # GLM-4.5-Air: a layer's 128 experts.
    experts = Experts(
        num_experts=128, num_active=8, ffn_hidden_size=1408, shared_ffn_hidden_size=1408, num_dense_layers=1
    )
    air = dataclasses.replace(QWEN3, family="glm4_moe", hidden_size=4096, ffn_hidden_size=10944, experts=experts)
    of_layer = 128 * 3 * 4096 * 1408 * 2
    for size in (1, 2):
        needs = count_needs(air, "bfloat16", size, 8, 100)
        assert needs.work - count_needs(QWEN3, "bfloat16", size, 8, 100).work > of_layer / size


def test_ranks_and_engines_of_one_device_are_in_no_group_of_its_collectives(model: Path) -> None:
    for transport, is_refused in (("shm", False), ("nccl", True)):
        rollout = RolloutConfig(colocate="share", transport=transport, devices=(0,))
        settings = SidecarSettings(
            platform="cuda", hf_model=model, seq_length=64, rollout=rollout, reward=RewardConfig()
        )
        problems = [problem for problem in check_sharing(settings, 1) if transport in problem]
        assert bool(problems) == is_refused, transport
        assert all("write --rollout-transport shm" in problem for problem in problems)


def test_an_engine_is_started_with_its_part_and_a_users_flags_follow() -> None:
    config = ServerConfig("model", 8, device="cuda", memory=EngineMemory(0.25, 4096), flags=("--seed", "1"))
    command = make_process_spec(config, "engine-0", make_socket_folder(), Path("log")).command
    start = command.index("--gpu-memory-utilization")
    assert command[start : start + 4] == ("--gpu-memory-utilization", "0.25", "--kv-cache-memory-bytes", "4096")
    assert command[-2:] == ("--seed", "1")
    alone = dataclasses.replace(config, memory=None)
    command = make_process_spec(alone, "engine-0", make_socket_folder(), Path("log")).command
    assert not {"--gpu-memory-utilization", "--kv-cache-memory-bytes"} & {*command}


def test_the_part_travels_to_the_sidecar(tmp_path: Path, model: Path) -> None:
    settings = sidecar_settings.parse(f"{WORDS} --hf-model {model}".split())
    sent = dataclasses.replace(settings, memory=EngineMemory(0.5, 1 << 33))
    sidecar_settings.write_message(tmp_path / "sidecar.json", sent)
    received = sidecar_settings.read_settings(["--settings", str(tmp_path / "sidecar.json")])
    assert received.memory == sent.memory
    assert configure_server(received.rollout, model, 64, "cuda", 1, received.memory).memory == sent.memory


@pytest.mark.parametrize(
    ("words", "is_divided"),
    [
        ("", False),
        ("--kv-cache-dtype fp8", False),
        ("--gpu-memory-utilization 0.3", True),
        ("--gpu_memory_util=0.3", True),
        ("--kv-cache-mem 8G", True),
        ("--num-gpu-blocks-override 100", True),
        ("--served-model-name gpu -- -", False),
    ],
)
def test_a_users_own_division_is_recognised_however_it_is_written(words: str, is_divided: bool) -> None:
    assert is_divided_by_user(words) == is_divided


def resolve(words: str, model: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int] | None, str]:
    """Return the devices of a run's engines beside these ranks, and the problems of sharing."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    given = sidecar_settings.parse(f"{WORDS} --rollout-devices 0 --hf-model {model}".split())
    values = {"devices": None, **dict(item.split("=") for item in words.split())}
    named = None if values["devices"] is None else [int(digit) for digit in values["devices"]]
    rollout = dataclasses.replace(
        given.rollout,
        devices=named,
        colocate="share" if "colocated" in values else "off",
        num_engines=int(values.get("engines", 1)),
        tensor_parallel_size=int(values.get("size", 1)),
    )
    settings = sidecar_settings.pick_devices(dataclasses.replace(given, rollout=rollout), num_ranks)
    return settings.rollout.devices, "\n".join(sidecar_settings.check_sharing(settings, num_ranks))


def test_engines_get_the_ranks_devices_if_they_share_them(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("colocated=1", model, 1, monkeypatch) == ([0], "")
    assert resolve("colocated=1 engines=2 size=2", model, 4, monkeypatch) == ([0, 1, 2, 3], "")
    assert resolve("colocated=1 devices=1", model, 2, monkeypatch) == ([1], "")
    assert resolve("engines=2", model, 2, monkeypatch) == ([2, 3], "")
    # More engines than devices are refused by another check.
    assert resolve("colocated=1 engines=5", model, 4, monkeypatch) == (None, "")


def test_a_ranks_device_is_named_with_the_flag_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices, problem = resolve("devices=12", model, 2, monkeypatch)
    assert devices == [1, 2]
    assert problem == (
        "--rollout-devices 1 2: ranks compute on 1: name devices from 2 on, or write --rollout-colocate too, which "
        "divides the memory between ranks and engines"
    )
    _, problem = resolve("devices=23 colocated=1", model, 2, monkeypatch)
    assert problem == "--rollout-colocate: no rank computes on --rollout-devices 2 3: drop one of the two"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return the settings of a run that shares a device, as if this host had one."""
    large = dataclasses.replace(QWEN3, hidden_size=1024, vocab_size=150_000)
    words = ("--platform", "cpu", "--hf-model", folder(tmp_path, large), *RUN)
    settings = parse_run(*words, world_size=2)
    sidecar = dataclasses.replace(
        settings.sidecar, rollout=dataclasses.replace(settings.sidecar.rollout, colocate="share")
    )
    device = SimpleNamespace(memory=lambda: SimpleNamespace(total=80 * GIB))
    monkeypatch.setattr(platforms, "select", lambda name: device)
    return dataclasses.replace(settings, sidecar=sidecar)


def test_a_run_divides_its_device_by_what_doctor_counts(run) -> None:
    with rank_memory.begin_count(run) as count:
        sidecar, line = rank_memory.share_device(run, count)
    command = [sys.executable, "-m", "megatron_rl.cli", "doctor", "--fit", "2", *run.words]
    table = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    (start,) = (place for place, row in enumerate(table) if row.startswith("stage   parameters"))
    counted = float(table[start + 1].split()[-1])
    assert counted > 1
    assert f"({counted:.1f} counted)" in line
    needs = count_needs(run.architecture, "float32", 1, run.rollout.max_num_seqs, 128)
    assert sidecar.memory == divide(80 * GIB, round(counted * GIB), needs).memory
    assert f"weights {needs.weights / GIB:.1f}" in line
    assert dataclasses.replace(sidecar, memory=None) == run.sidecar


@pytest.mark.parametrize("is_shared", [True, False])
def test_the_sidecar_is_started_with_its_part_of_a_device_that_is_shared(
    is_shared: bool, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, said = [], []
    counted = contextlib.nullcontext(SimpleNamespace(wait=lambda: 9 * GIB))
    prompts = SimpleNamespace(list_kinds=lambda: ())
    monkeypatch.setattr(rank_memory, "begin_count", lambda settings: counted)
    monkeypatch.setattr(loop_run, "check_inputs", lambda settings: SimpleNamespace(is_finished=False))
    monkeypatch.setattr(loop_run, "load_inputs", lambda settings, checked, startup: Inputs(prompts=prompts))
    sidecar = SimpleNamespace(log="", close=lambda: None, try_rewards=lambda trials: None)
    monkeypatch.setattr(loop_run, "OwnSidecar", lambda settings, module: started.append(settings) or sidecar)
    startup = SimpleNamespace(show=lambda stream: None, say=said.append, end_part=lambda name: None)
    rollout = dataclasses.replace(run.sidecar.rollout, colocate="share" if is_shared else "off")
    settings = dataclasses.replace(run, sidecar=dataclasses.replace(run.sidecar, rollout=rollout))
    with contextlib.ExitStack() as stack:
        loop_run._prepare(settings, startup, stack)
    (given,) = started
    assert (given.memory is not None) == is_shared
    assert any(line.startswith("device memory: 80.0 GiB") for line in said) == is_shared


def test_a_count_that_fails_is_said_and_nothing_is_assumed(run) -> None:
    broken = dataclasses.replace(run, words=("--no-such-flag",))
    with (
        rank_memory.begin_count(broken) as count,
        pytest.raises(UsageError, match="memory of a rank could not be counted: unknown flag --no-such-flag"),
    ):
        rank_memory.share_device(broken, count)


def test_a_user_who_divides_the_device_is_asked_nothing(run) -> None:
    words = "--gpu-memory-utilization 0.3"
    divided = dataclasses.replace(run, rollout=dataclasses.replace(run.rollout, vllm_args=words))
    assert rank_memory.begin_count(divided) is None
    sidecar, line = rank_memory.share_device(divided, None)
    assert sidecar == run.sidecar
    assert line == "device memory: --rollout-vllm-args divides it between ranks and engines"


def test_the_program_that_counts_reports_mistakes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The program sets this variable, and ends.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert rank_memory.main(["1", "--platform", "cpu", "--no-such-flag"]) == ExitCode.USAGE
    assert "unknown flag --no-such-flag" in capsys.readouterr().err
