"""`megatron-rl serve` up to its server: the weights that it chooses, the server's command, and how it fails."""

import asyncio
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.commands import serve
from megatron_rl.config.rollout import RewardConfig, RolloutConfig
from megatron_rl.errors import InputError, UsageError
from megatron_rl.observe.run_folder import SavedConfig, Value, write_saved_config
from megatron_rl.sidecar.settings import SidecarSettings, write_message
from megatron_rl.sidecar.vllm.key_check import KeyCheck
from megatron_rl.sidecar.vllm.server import KEY_MIDDLEWARE, ServerConfig, make_open_spec
from megatron_rl.trainer.mcore.checkpoint.folders import TRACKER
from tests.hf_models import draw


def make_run(folder: Path, **values: dict[str, str]) -> Path:
    """Write what a run leaves in its folder, with these values of its configuration."""
    run = folder / "save" / "rollout" / "run"
    run.mkdir(parents=True)
    settings = SidecarSettings(
        "cpu", Path("BASE"), 64, RolloutConfig(folder=Path("save/rollout/run")), RewardConfig(),
        weights_bridge="my bridge.py:A",
    )  # fmt: skip
    write_message(run / "sidecar.json", settings)
    sections = {
        section: {name: Value(text, "") for name, text in texts.items()}
        for section, texts in {"checkpoint": {"save": str(folder / "save"), "save_hf": "-"}, **values}.items()
    }
    write_saved_config(run / "config.json", SavedConfig(sections=sections))
    return run


def note_checkpoint(folder: Path, iteration: int) -> None:
    (folder / "save" / TRACKER).write_text(f"{iteration}\n")


def test_a_checkpoint_of_adapters_is_converted_with_the_runs_base_precision_and_targets(tmp_path: Path) -> None:
    lora = {"rank": "4", "alpha": "-", "targets": "q_proj v_proj"}
    run = make_run(tmp_path, lora=lora, publish={"dtype": "bfloat16"})
    note_checkpoint(tmp_path, 12)
    source = serve.find_source(run)
    assert source.folder is None
    assert source.name == f"version 12 of the run run, from {tmp_path / 'save' / 'iter_0000012'}"
    assert source.words == [
        "--load", str(tmp_path / "save"), "--ckpt-step", "12", "--hf-model", str(tmp_path / "BASE"), "--weights-bridge",
        "my bridge.py:A", "--publish-dtype", "bfloat16", "--lora-rank", "4", "--lora-targets", "q_proj", "v_proj",
    ]  # fmt: skip


def test_a_relative_path_is_meant_where_the_run_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, checkpoint={"save": "-", "save_hf": "hf"})
    other = tmp_path / "elsewhere"
    for folder, name in ((tmp_path, "iter_0000010"), (other, "iter_0000020")):
        (folder / "hf" / name).mkdir(parents=True)
    monkeypatch.chdir(other)
    assert serve.find_source(run).folder == tmp_path / "hf" / "iter_0000010"
    moved = run.rename(tmp_path / "moved")
    with pytest.raises(InputError, match="was started with --save-hf hf, in a folder that is not known"):
        serve.find_source(moved)


def test_an_exported_folder_is_served_unless_a_checkpoint_is_newer(tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoint={"save": "-", "save_hf": str(tmp_path / "hf")})
    for name in ("iter_0000008", "iter_0000010", "iter_0000010_adapter"):
        (tmp_path / "hf" / name).mkdir(parents=True)
    assert serve.find_source(run).folder == tmp_path / "hf" / "iter_0000010"
    # The folder of --save is where it is now.
    note_checkpoint(tmp_path, 10)
    assert serve.find_source(tmp_path / "save").folder == tmp_path / "hf" / "iter_0000010"
    note_checkpoint(tmp_path, 11)
    newer = serve.find_source(tmp_path / "save")
    assert (newer.folder, newer.words[3]) == (None, "11")


def test_a_run_without_a_checkpoint_and_flags_that_are_set_are_refused_by_name(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(InputError, match="has no checkpoint to serve: --save and --save-hf keep them"):
        serve.find_source(run)
    with pytest.raises(UsageError, match="--api-key"):
        serve.main([str(run), "--api-key", "mine"])


def test_clients_of_the_server_can_neither_pause_it_nor_see_its_key_among_processes(tmp_path: Path) -> None:
    config = ServerConfig(model="MODEL", max_model_len=64, flags=("--kv-cache-dtype", "fp8"), lora_rank=4)
    place, flags = ("127.0.0.1", 8000), ["--max-model-len", "8"]
    # The path of the sockets must be short.
    with tempfile.TemporaryDirectory() as folder:
        spec = make_open_spec(config, Path(folder), tmp_path / "log", place, "secret", flags)
    assert spec.environment["VLLM_API_KEY"] == "secret"
    assert "VLLM_SERVER_DEV_MODE" not in spec.environment
    words = " ".join(spec.command)
    assert "secret" not in words
    assert words.endswith(f"--port 8000 --middleware {KEY_MIDDLEWARE} --kv-cache-dtype fp8 --max-model-len 8")
    for flag in ("--uds", "--skip-tokenizer-init", "--worker-extension-cls", "--enable-lora"):
        assert flag not in spec.command


@pytest.mark.parametrize(("path", "key", "status"), [
    ("/invocations", b"", 401), ("/tokenize", b"Bearer other", 401), ("/v1/models", b"secret", 401),
    ("/invocations", b"Bearer secret", 200), ("/health", b"", 200),
])  # fmt: skip
def test_every_route_but_health_wants_the_key(
    path: str, key: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    sent: list[dict[str, Any]] = []

    async def answer(scope: object, receive: object, send: Any) -> None:
        await send({"status": 200})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "headers": [(b"authorization", key)]}
    asyncio.run(KeyCheck(answer)(scope, answer, send))
    assert sent[0]["status"] == status


def set_server(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str, minutes: float = 5.0) -> None:
    """Let a script take vLLM's place."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(serve, "RolloutConfig", lambda: RolloutConfig(python=program, start_minutes=minutes))


def test_a_server_that_ends_or_is_late_is_reported_with_its_last_lines_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = draw("qwen3", tmp_path / "model", 0)
    set_server(monkeypatch, tmp_path, "echo it is broken; exit 3")
    with pytest.raises(serve.ServingFailed, match=r"(?s)vLLM ended with exit code 3; .*it is broken"):
        serve.main([str(model), "--port", "0"])
    set_server(monkeypatch, tmp_path, "echo it sleeps; exec sleep 600", minutes=0.01)
    with pytest.raises(
        serve.ServingFailed, match=r"(?s)vLLM was not up after 0.01 minutes, and still runs; .*it sleeps"
    ):
        serve.main([str(model), "--port", "0"])
    for line in capsys.readouterr().out.splitlines():
        assert not Path(line.rpartition(" ")[2]).parent.exists()


def test_a_failed_conversion_is_reported_with_its_reason(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    note_checkpoint(tmp_path, 3)
    with pytest.raises(
        serve.ServingFailed, match="(?s)megatron-rl convert ended with exit code 4; .*BASE/config.json does not exist"
    ):
        serve.main([str(run), "--port", "0"])


def test_a_port_that_is_in_use_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    model = draw("qwen3", tmp_path / "model", 0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        with pytest.raises(UsageError, match=f"the address 127.0.0.1:{port} cannot be opened"):
            serve.main([str(model), "--port", port])
