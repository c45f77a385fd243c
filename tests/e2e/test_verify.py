"""`megatron-rl verify` against vLLM's own server, which has our worker extension and nothing else of ours."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.cli import main
from tests import hf_models
from tests.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
MODELS = {
    # Experts, whose weights vLLM stacks and packs, on two workers.
    "qwen3_moe": {"head_dim": 32, "moe_intermediate_size": 128},
    # Latent attention, with tensors that vLLM derives from others.
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64},
    # Biases, and an output layer that is tied.
    "qwen2": {"num_attention_heads": 2, "num_key_value_heads": 1},
}


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Start a server; return its address and the folder of its model."""
    folder = hf_models.draw(request.param, tmp_path_factory.mktemp("model"), **MODELS[request.param])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    size = 2 if request.param == "qwen3_moe" else 1
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port),
        "--worker-extension-cls", "megatron_rl.verify.worker.Verifier", "--skip-tokenizer-init", "--enforce-eager",
        "--max-model-len", "64", "--dtype", "float32", "--kv-cache-memory-bytes", str(1 << 24),
        "--gpu-memory-utilization", "0.1", "--tensor-parallel-size", str(size),
    ]  # fmt: skip
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "|".join("01"[:size])}
    variables = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(ROOT), **cores}
    log = folder.parent / f"{request.param}.log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, env=os.environ | variables, stdout=output, stderr=output)
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + 600
    try:
        while not _is_ready(address):
            assert server.poll() is None, log.read_text()[-6000:]
            assert time.monotonic() < end, log.read_text()[-6000:]
            time.sleep(1)
        yield address, folder
    finally:
        server.terminate()
        server.wait(60)


def _is_ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def answer(address: str) -> list[int]:
    """Return the tokens that the server answers with."""
    asked = {"prompt": [1, 2, 3, 4], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    (choice,) = httpx.post(f"{address}/v1/completions", json=asked, timeout=60).json()["choices"]
    tokens: list[int] = choice["token_ids"]
    return tokens


def test_every_changed_number_is_found_where_it_is_and_the_server_stays_as_it_was(served, tmp_path, capsys) -> None:
    address, folder = served
    before = answer(address)
    words = ["verify", address, "--json", "--model"]
    assert main([*words, str(folder)]) == 0
    workers = json.loads(capsys.readouterr().out)
    assert all(worker["compared"] > 30 for worker in workers)
    weights = load_file(folder / "model.safetensors")
    for name in sorted(weights):
        changed = weights[name].clone()
        changed.view(-1)[-1] = changed.view(-1)[-1] * 1.5 + 0.01
        save_file({**weights, name: changed}, tmp_path / "model.safetensors")
        assert main([*words, str(tmp_path)]) == 5, name
        found = json.loads(capsys.readouterr().out)
        numbers = [one["numbers"] for worker in found for one in worker["different"].values()]
        # Each worker holds what is not divided; what vLLM derives follows from the weights in use.
        assert set(numbers) == {1}, (name, found)
        assert len(numbers) <= len(workers)
        assert not any(worker["unknown"] for worker in found)
        assert answer(address) == before
    assert main([*words, str(folder)]) == 0


def test_a_folder_that_lacks_a_tensor_or_has_another_shape_is_not_the_servers(served, tmp_path, capsys) -> None:
    address, folder = served
    before, weights = answer(address), load_file(folder / "model.safetensors")
    norm = weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "model.safetensors")
    assert main(["verify", address, "--model", str(tmp_path)]) == 5
    assert "model.norm.weight: not compared, the folder has no weights for it" in capsys.readouterr().out
    for other, said in (({"model.norm.weight": torch.ones(3)}, "cannot load"), ({}, "has no safetensors")):
        (tmp_path / "model.safetensors").unlink()
        if other:
            save_file({**weights, **other}, tmp_path / "model.safetensors")
        assert main(["verify", address, "--model", str(tmp_path)]) == 4
        assert said in capsys.readouterr().err
        if not other:
            break
    assert len(norm) > 3
    assert answer(address) == before
    assert main(["verify", address, "--model", str(folder)]) == 0
