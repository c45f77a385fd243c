"""Engines' processes: tied to their parent, logged within bounds, started in private folders. Without vLLM."""

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.errors import UsageError
from megatron_rl.sidecar.launcher import LOG_FILES, LOG_LINES, LocalLauncher, Log, ProcessSpec
from megatron_rl.sidecar.supervisor import SupervisorConfig
from megatron_rl.sidecar.temporary import make_socket_folder
from megatron_rl.sidecar.vllm.scheduler import SCHEDULER
from megatron_rl.sidecar.vllm.server import ServerConfig, configure_server, make_process_spec

CONFIG = ServerConfig(model="/models/qwen", max_model_len=128)

# Like vLLM's processes: the API server forks or spawns a core, which forks or spawns a worker.
FAKE_VLLM = """
    import multiprocessing, os, sys, time

    def worker():
        time.sleep(600)

    def core(method):
        child = multiprocessing.get_context(method).Process(target=worker)
        child.start()
        print(f"pids {os.getppid()} {os.getpid()} {child.pid}", flush=True)
        time.sleep(600)

    if __name__ == "__main__":
        from vllm.entrypoints.openai import fake_processes
        method = sys.argv[sys.argv.index("--model") + 1]
        child = multiprocessing.get_context(method).Process(target=fake_processes.core, args=(method,))
        child.start()
        time.sleep(600)
"""


@pytest.fixture
def fake_vllm(tmp_path: Path) -> Path:
    """Write a folder with a package that starts processes as vLLM does."""
    package = tmp_path / "packages" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:2]):
        (folder / "__init__.py").touch()
    for name in ("api_server.py", "fake_processes.py"):
        (package / name).write_text(textwrap.dedent(FAKE_VLLM))
    return tmp_path / "packages"


def spec_of(**changes: Any) -> ProcessSpec:
    return make_process_spec(dataclasses.replace(CONFIG, **changes), "engine-0", make_socket_folder(), Path("log"))


def started(config: ServerConfig, folder: Path, packages: Path):
    start = make_process_spec(config, "engine-0", folder, folder / "engine-0.log")
    path = f"{packages}:{start.environment['PYTHONPATH']}"
    return LocalLauncher().start(dataclasses.replace(start, environment={**start.environment, "PYTHONPATH": path}))


def pids(handle, seconds: float = 60) -> list[int]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for line in handle.log_lines():
            if line.startswith("pids "):
                return [int(pid) for pid in line.split()[1:]]
        time.sleep(0.02)
    raise AssertionError(handle.log_lines())


def gone(members: list[int], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while any(is_running(pid) for pid in members) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(is_running(pid) for pid in members)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("victim", [0, 1])
def test_whichever_process_is_killed_those_below_it_end(fake_vllm, method, victim):
    handle = started(dataclasses.replace(CONFIG, model=method), make_socket_folder(), fake_vllm)
    try:
        members = pids(handle)
        assert all(is_running(pid) for pid in members)
        os.kill(members[victim], signal.SIGKILL)
        assert gone(members[victim:])
    finally:
        handle.kill()
    assert gone(members)
    assert "SIGKILL" in handle.poll()


def test_nothing_outlives_a_starter_that_is_killed(fake_vllm, tmp_path):
    code = f"""
        import time
        from pathlib import Path
        from megatron_rl.sidecar.temporary import make_socket_folder
        from tests.unit.test_launcher import CONFIG, pids, started
        import dataclasses
        handle = started(dataclasses.replace(CONFIG, model="spawn"), make_socket_folder(), Path({str(fake_vllm)!r}))
        print(*pids(handle), flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        members = [int(pid) for pid in starter.stdout.readline().split()]
        assert len(members) == 3
        starter.kill()
    assert gone(members)


def test_an_engine_that_cannot_start_leaves_its_last_lines(tmp_path):
    command = (sys.executable, "-c", "print('first'); raise SystemExit('no such model')")
    handle = LocalLauncher().start(ProcessSpec("engine-0", command, dict(os.environ), tmp_path / "log", "/nowhere"))
    deadline = time.monotonic() + 60
    while handle.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    handle.kill()
    assert set(handle.log_lines()) == {"first", "no such model"}
    assert handle.poll() == "ended with exit code 1"


def log_of(path: Path, text: bytes, **bounds: int) -> Log:
    """Return the log of a process that printed this and ended."""
    reader, writer = os.pipe()
    log = Log(os.fdopen(reader, "rb", buffering=0), path, **bounds)
    with os.fdopen(writer, "wb") as file:
        file.write(text)
    log.close()
    return log


def test_a_log_is_rotated_by_size_and_keeps_its_last_files(tmp_path):
    lines = b"".join(b"line %05d\n" % number for number in range(1000))
    log = log_of(tmp_path / "engine-0.log", lines, max_bytes=2000, num_files=3)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"engine-0.log", "engine-0.log.1", "engine-0.log.2"}
    assert max(sizes.values()) <= 2000 + 11
    kept = b"".join((tmp_path / f"engine-0.log{suffix}").read_bytes() for suffix in (".2", ".1", ""))
    assert lines.endswith(kept)
    assert log.last_lines()[-2:] == ["line 00998", "line 00999"]
    assert (tmp_path / "engine-0.log").stat().st_mode & 0o077 == 0


def test_the_log_of_the_first_death_is_kept_until_an_engine_is_given_up(tmp_path):
    num_lives = 1 + SupervisorConfig().max_failures
    for life in range(num_lives):
        log_of(tmp_path / "engine-0.log", b"life %d" % life)
    assert (tmp_path / f"engine-0.log.{num_lives - 1}").read_text() == "life 0"
    assert (tmp_path / "engine-0.log").read_text() == f"life {num_lives - 1}"
    for _ in range(20):
        log_of(tmp_path / "engine-0.log", b"another")
    assert len(list(tmp_path.iterdir())) == LOG_FILES


def test_the_output_of_a_process_is_in_its_log_at_once(tmp_path):
    reader, writer = os.pipe()
    log = Log(os.fdopen(reader, "rb", buffering=0), tmp_path / "engine-0.log")
    with os.fdopen(writer, "wb", buffering=0) as file:
        for number in range(2000):
            file.write(b"line %d\nunfin" % number)
            assert log.last_lines()[-2:] == [f"{'unfin' if number else ''}line {number}", "unfin"]
    log.close()


def test_the_lines_of_a_log_that_were_not_seen_are_told_once_and_the_last_of_very_many(tmp_path):
    reader, writer = os.pipe()
    log = Log(os.fdopen(reader, "rb", buffering=0), tmp_path / "engine-0.log")
    os.write(writer, b"one\ntwo\nthree\nunfin")
    assert log.new_lines(0) == (3, ["one", "two", "three"])
    assert log.new_lines(2) == (3, ["three"])
    assert log.new_lines(3) == (3, [])
    os.write(writer, b"ished\n" + b"".join(b"%d\n" % number for number in range(LOG_LINES)))
    num_lines, lines = log.new_lines(3)
    assert (num_lines, len(lines)) == (4 + LOG_LINES, LOG_LINES)
    assert (lines[0], lines[-1]) == ("0", str(LOG_LINES - 1))
    os.close(writer)
    log.close()


def test_an_engine_listens_on_a_unix_socket_and_takes_no_setting_from_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    start = spec_of()
    flags = dict(zip(start.command[3::2], start.command[4::2], strict=False))
    assert flags["--uds"] == start.address
    assert "--host" not in start.command
    assert "--port" not in start.command
    assert ("--logprobs-mode", "processed_logprobs") in zip(start.command, start.command[1:], strict=False)
    assert "VLLM_API_KEY" not in start.environment
    assert os.listdir(start.environment["PYTHONPATH"]) == ["megatron_rl"]


def test_an_engine_takes_over_what_the_user_says_of_its_libraries(monkeypatch):
    handed_on = {
        "NCCL_DEBUG": "INFO", "HCCL_CONNECT_TIMEOUT": "7200", "VLLM_ATTENTION_BACKEND": "FLASHINFER",
        "CUDA_VISIBLE_DEVICES": "4,5", "XDG_CACHE_HOME": "/scratch/cache", "TRITON_CACHE_DIR": "/scratch/triton",
        "VLLM_CPU_KVCACHE_SPACE": "7", "HF_HOME": "/scratch/hf", "GLIBC_TUNABLES": "glibc.malloc.check=1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_CUDA_ARCH_LIST": "9.0",
        "FLASHINFER_WORKSPACE_BASE": "/scratch/flashinfer",
    }  # fmt: skip
    withheld = {"VLLM_API_KEY": "secret", "VLLM_PORT": "8000", "WANDB_API_KEY": "secret", "RANK": "3"}
    withheld |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    for name, value in (handed_on | withheld).items():
        monkeypatch.setenv(name, value)
    environment = spec_of().environment
    assert {name: environment.get(name) for name in handed_on} == handed_on
    assert not withheld.keys() & environment.keys()
    # The engine's own settings win over such variables.
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/elsewhere")
    folder = make_socket_folder()
    assert make_process_spec(CONFIG, "engine-0", folder, Path("log")).environment["VLLM_RPC_BASE_PATH"] == str(folder)


def test_an_engine_finds_the_users_packages_unless_it_has_an_interpreter_of_its_own(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/users/packages:/more")
    for python, is_handed_on in ((sys.executable, True), ("/another/python", False)):
        environment = spec_of(python=python).environment
        first, *others = environment["PYTHONPATH"].split(os.pathsep)
        assert os.listdir(first) == ["megatron_rl"]
        assert others == (["/users/packages", "/more"] if is_handed_on else [])


@pytest.mark.parametrize(("device", "expected"), [("cpu", "glibc.malloc.hugetlb=1"), ("cuda", None)])
def test_an_engine_on_a_cpu_asks_for_large_pages(device, expected, monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert spec_of(device=device).environment.get("GLIBC_TUNABLES") == expected


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_no_engine_gets_the_memory_that_one_with_another_share_had(device, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_STARTUP_PLAN", "1")
    assert "VLLM_ENABLE_STARTUP_PLAN" not in spec_of(device=device).environment


@pytest.mark.parametrize(
    ("device", "flags", "expected"),
    [
        ("cpu", "", ["--scheduler-cls", SCHEDULER]),
        ("cuda", "--seed 1", ["--scheduler-cls", SCHEDULER]),
        # A flag that only begins alike.
        ("cuda", "--scheduling-policy priority", ["--scheduler-cls", SCHEDULER]),
        ("cuda", "--scheduler-cls a.B", ["--scheduler-cls", "a.B"]),
        ("cuda", "--scheduler_cls=a.B", ["--scheduler_cls=a.B"]),
        ("cpu", "--seed 1 --scheduler-c a.B", ["--scheduler-c", "a.B"]),
        ("npu", "", []),
        ("npu", "--scheduler-cls a.B", ["--scheduler-cls", "a.B"]),
    ],
)
def test_the_users_scheduler_takes_the_place_of_ours_and_the_log_says_so_once(
    device, flags, expected, caplog, tmp_path
):
    caplog.set_level("INFO")
    rollout = RolloutConfig(vllm_args=flags, dtype="float32")
    config = configure_server(rollout, write_config(tmp_path, {}), 128, device, num_threads=1)
    for name in ("engine-0", "engine-1", "engine-0"):
        command = make_process_spec(config, name, make_socket_folder(), Path("log")).command
        start = next((i for i, word in enumerate(command) if word.startswith(("--scheduler-c", "--scheduler_c"))), None)
        found = [] if start is None else [*command[start : start + len(expected)]]
        assert found == expected
        assert sum(word.startswith(("--scheduler-c", "--scheduler_c")) for word in command) == min(1, len(expected))
    said = [record.message for record in caplog.records if "scheduler" in record.message]
    is_users = "a.B" in flags
    assert said == ["engines use the scheduler of --rollout-vllm-args: outputs are sent as it sends them"] * is_users


LATENTS = {
    "model_type": "glm4_moe_lite", "kv_lora_rank": 512, "qk_nope_head_dim": 16, "qk_rope_head_dim": 64,
    "v_head_dim": 16, "q_lora_rank": None, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
}  # fmt: skip


def write_config(folder: Path, changes: dict[str, Any]) -> Path:
    """Write the config.json of a small Qwen3, or of another model by these changes."""
    config = {
        "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 8, "vocab_size": 64,
        "num_attention_heads": 2, "max_position_embeddings": 256, **changes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("device", "changes", "flags", "expected"),
    [
        ("cpu", LATENTS, "--seed 1", ['{"custom_ops": ["-rotary_embedding"]}']),
        ("cpu", {}, "", []),
        ("cuda", LATENTS, "", []),
        # The worker refuses the engine if these leave the operation on.
        ("cpu", LATENTS, "--compilation-config '{}'", ["{}"]),
        ("cpu", LATENTS, "--compilation-config.mode 0", []),
        ("cpu", LATENTS, "-cc.mode=0", []),
    ],
)
def test_an_engine_with_latents_on_a_cpu_rotates_in_torch_unless_the_user_configures_compilation(
    tmp_path, device, changes, flags, expected
):
    rollout = RolloutConfig(vllm_args=flags)
    config = configure_server(rollout, write_config(tmp_path, changes), 128, device, num_threads=1)
    command = make_process_spec(config, "engine-0", make_socket_folder(), Path("log")).command
    found = [value for flag, value in itertools.pairwise(command) if flag == "--compilation-config"]
    assert found == expected
    backends = [value for flag, value in itertools.pairwise(command) if flag == "--attention-backend"]
    assert backends == (["CPU_MLA"] if changes and device == "cpu" else [])


def test_a_folder_that_others_can_enter_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(UsageError, match="must belong to you and have mode 700"):
        make_process_spec(CONFIG, "engine-0", tmp_path, tmp_path / "log")


def test_a_folder_too_deep_for_sockets_is_refused(tmp_path):
    with pytest.raises(UsageError, match="choose a shorter one"):
        make_process_spec(CONFIG, "engine-0", tmp_path / ("x" * 80), tmp_path / "log")


@pytest.mark.parametrize(
    ("device", "variable"), [("cuda", "CUDA_VISIBLE_DEVICES"), ("npu", "ASCEND_RT_VISIBLE_DEVICES")]
)
def test_an_engine_sees_its_own_accelerators(device, variable):
    config = dataclasses.replace(CONFIG, device=device, devices=(2, 3), tensor_parallel_size=2, transport="nccl")
    start = make_process_spec(config, "engine-0", make_socket_folder(), Path("log"))
    assert start.environment[variable] == "2,3"
    assert ("--weight-transfer-config", '{"backend": "nccl"}') in zip(start.command, start.command[1:], strict=False)
    assert "--enforce-eager" not in start.command
    assert ("VLLM_ASCEND_ENABLE_NZ" in start.environment) == (device == "npu")


@pytest.mark.parametrize("names", ["4,5,6,7", "GPU-a,GPU-b,GPU-c,GPU-d"])
def test_an_engines_accelerators_are_counted_among_those_that_are_visible(names, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    config = dataclasses.replace(CONFIG, device="cuda", devices=(2, 3), tensor_parallel_size=2)
    start = make_process_spec(config, "engine-0", make_socket_folder(), Path("log"))
    assert start.environment["CUDA_VISIBLE_DEVICES"] == ",".join(names.split(",")[2:])
