"""`megatron-rl verify` against vLLM's own server, which has our worker extension and nothing else of ours."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_rl.cli import main
from megatron_rl.verify import trl
from megatron_rl.verify.trainer import NotSynced
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
    # Linear layers that vLLM quantizes: its kernel wants bfloat16.
    "qwen3": {},
}
QUANTIZED = {"qwen3": ["--quantization", "fp8_per_channel"]}


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Start a server; return its address and the folder of its model."""
    folder = hf_models.draw(request.param, tmp_path_factory.mktemp("model"), **MODELS[request.param])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    size = 2 if request.param == "qwen3_moe" else 1
    dtype = "bfloat16" if request.param in QUANTIZED else "float32"
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port),
        "--worker-extension-cls", "megatron_rl.verify.worker.Verifier", "--skip-tokenizer-init", "--enforce-eager",
        "--max-model-len", "64", "--dtype", dtype, "--kv-cache-memory-bytes", str(1 << 24),
        "--gpu-memory-utilization", "0.1", "--tensor-parallel-size", str(size),
        *QUANTIZED.get(request.param, []),
    ]  # fmt: skip
    if request.param == "qwen2":
        command += ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"tuned={draw_adapter(folder)}"]
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


def draw_adapter(folder: Path) -> Path:
    """Draw an adapter of the model's with PEFT."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    targets = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=12, target_modules=targets))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    tuned.save_pretrained(folder / "adapter")
    return folder / "adapter"


def is_quantized(folder: Path) -> bool:
    return json.loads((folder / "config.json").read_text())["model_type"] in QUANTIZED


def _is_ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def answer(address: str, model: str | None = None) -> list[int]:
    """Return the tokens that the server answers with."""
    asked = {
        "model": model,
        "prompt": [1, 2, 3, 4],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
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
        if is_quantized(folder):
            # A row has its scale, and so other numbers.
            assert numbers, (name, found)
        else:
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
    assert "model.norm.weight: not compared, no weights are given for it" in capsys.readouterr().out
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


def test_an_adapter_is_compared_in_its_slot(served, tmp_path, capsys) -> None:
    address, folder = served
    adapter = folder / "adapter"
    words = ["verify", address, "--model", str(folder), "--adapter"]
    if not adapter.exists():
        assert main([*words, str(tmp_path)]) == 4
        assert "has no slots for adapters: start it with --enable-lora" in capsys.readouterr().err
        return
    assert main([*words, str(adapter)]) == 0
    assert "adapter 1: 56 of 56 tensors are equal, bit for bit" in capsys.readouterr().out
    shutil.copytree(adapter, tmp_path / "other")
    weights = load_file(adapter / "adapter_model.safetensors")
    before = answer(address, "tuned")
    for name in weights:
        changed = weights[name].clone()
        changed.view(-1)[-1] += 0.1
        save_file({**weights, name: changed}, tmp_path / "other" / "adapter_model.safetensors")
        assert main([*words, str(tmp_path / "other"), "--json"]) == 5, name
        (worker,) = json.loads(capsys.readouterr().out)
        assert not worker["different"]
        assert [one["numbers"] for one in worker["adapter"]["different"].values()] == [1], name
    assert answer(address, "tuned") == before != answer(address)
    assert main([*words, str(tmp_path)]) == 4
    assert "vLLM cannot load" in capsys.readouterr().err


def test_log_probs_show_a_changed_layer_and_say_what_they_cannot_show(served, tmp_path, capsys) -> None:
    address, folder = served
    words = ["verify", address, "--by-log-probs", "--model"]
    if is_quantized(folder):
        assert main([*words, str(folder)]) == 5
        return
    assert main([*words, str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "the weights may be equal" in printed
    seen = dict(re.findall(r"  (model.layers.\d): a random change of its weights is seen from (.*) % on", printed))
    assert len(seen) >= 2
    shutil.copytree(folder, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    for layer, least in seen.items():
        # Three times the least change that is said to be seen, then a tenth of it.
        for times, code in ((3, 5), (0.1, 0)):
            generator = torch.Generator().manual_seed(3)
            changed = {
                name: weight * (1 + times * float(least) / 100 * torch.randn(weight.shape, generator=generator))
                if name.startswith(f"{layer}.") else weight
                for name, weight in weights.items()
            }  # fmt: skip
            save_file(changed, tmp_path / "model" / "model.safetensors")
            assert main([*words, str(tmp_path / "model")]) == code, (layer, least, capsys.readouterr().out)


def test_each_version_that_is_written_has_a_line(served, tmp_path) -> None:
    address, folder = served
    command = [sys.executable, "-m", "megatron_rl.cli", "verify", address, "--watch", "--model", str(tmp_path)]
    weights = load_file(folder / "model.safetensors")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as watching:
        try:
            for number, factor in enumerate((1.0, 1.5, 1.0)):
                (version := tmp_path / f"iter_{number}").mkdir()
                weights["model.norm.weight"] *= factor
                save_file(weights, version / "model.safetensors")
                line = watching.stdout.readline()
                assert f"{version}: worker 0: " in line
                assert ("model.norm.weight: " in line) == (number > 0)
        finally:
            watching.send_signal(signal.SIGINT)
    assert watching.wait(30) == 5


def test_a_trainer_of_trl_compares_what_a_server_holds(served) -> None:
    address, folder = served
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    if any("experts.gate_up_proj" in name for name, _ in model.named_parameters()):
        # vLLM does not load experts as transformers 5 stacks them, so TRL cannot sync them.
        return
    generation = SimpleNamespace(
        mode="server",
        model=model,
        sync_weights=lambda: None,
        accelerator=SimpleNamespace(is_main_process=True, process_index=0),
        vllm_client=SimpleNamespace(base_url=address),
        _iter_named_params=lambda: ((name, parameter.data) for name, parameter in model.named_parameters()),
    )
    watched = trl.watch(SimpleNamespace(vllm_generation=generation))
    generation.sync_weights()
    assert watched.num_syncs == 1
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    with pytest.raises(NotSynced, match=r"model\.norm\.weight: 1 of \d+ numbers differ"):
        generation.sync_weights()


def test_the_notebook_shows_an_equal_and_a_changed_folder(capsys) -> None:
    cells = json.loads((ROOT / "examples" / "verify.ipynb").read_text())["cells"]
    names: dict[str, object] = {}
    try:
        for cell in cells:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), names)
    finally:
        if "server" in names:
            names["server"].kill()
    printed = capsys.readouterr().out
    assert re.search(r"worker 0: (\d+) of \1 tensors are equal, bit for bit", printed)
    assert "gate_up_proj.weight: 1 of 12288 numbers differ, by at most 0.25; the first at [99, 5]" in printed
