"""Suites as published: lm-eval for `megatron-rl serve`, schemathesis for the gateway, MCP's for the example's client.

`make test-suites` runs it.
"""

import importlib.util
import json
import math
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import transformers

from megatron_rl.commands.rescore import log_probs
from tests.e2e import loop
from tests.serving import serving
from tests.suites.fuzzed_gateway import SCHEMA, FuzzedGateway

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="needs the suites: make test-suites"),
]
TASK = """
task: numbers
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""


def draw_rows(count: int) -> list[dict]:
    """Draw questions of numbers, each with three answers of different lengths."""
    draw = random.Random(0)

    def number_text(length: int) -> str:
        return " ".join(str(draw.randrange(2, 120)) for _ in range(length))

    return [
        {"question": number_text(3 + row), "choices": [number_text(1 + one) for one in range(3)], "answer": row % 3}
        for row in range(count)
    ]


def test_lm_evals_log_likelihoods_are_those_of_transformers(tmp_path: Path) -> None:
    model, rows = loop.draw_model(tmp_path / "model", head_dim=32), draw_rows(12)
    task, results = tmp_path / "task", tmp_path / "results"
    task.mkdir()
    (task / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (task / "numbers.yaml").write_text(TASK.format(rows=task / "rows.jsonl"))
    with serving(model, "--max-model-len", "256") as served:
        settings = f"model=policy,base_url={served.url}/completions,tokenizer={model},num_concurrent=4"
        command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", settings]
        command += ["--tasks", "numbers", "--include_path", str(task), "--log_samples", "--output_path", str(results)]
        subprocess.run(
            command, check=True, timeout=600,
            env={**os.environ, "OPENAI_API_KEY": served.key, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")},
        )  # fmt: skip
    (file,) = results.glob("policy/samples_numbers_*.jsonl")
    samples = {line["doc_id"]: line for line in map(json.loads, file.read_text().splitlines())}
    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    num_right = 0
    for number, row in enumerate(rows):
        prompt = np.array(tokenizer.encode(row["question"]))
        wholes = [np.array(tokenizer.encode(f"{row['question']} {choice}")) for choice in row["choices"]]
        truth = [math.fsum(log_probs(policy, prompt, whole[len(prompt) :], 1.0)) for whole in wholes]
        found = [float(answer[0][0]) for answer in samples[number]["resps"]]
        np.testing.assert_allclose(found, truth, atol=1e-3)
        num_right += int(np.argmax(truth)) == row["answer"]
    (file,) = results.glob("policy/results_*.json")
    assert json.loads(file.read_text())["results"]["numbers"]["acc,none"] == pytest.approx(num_right / len(rows))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedGateway]:
    gateway = FuzzedGateway(tmp_path_factory.mktemp("tokenizer"))
    thread = threading.Thread(target=gateway.run)
    thread.start()
    assert gateway.is_up.wait(60)
    yield gateway
    gateway.end()
    thread.join(60)


def test_schemathesis_finds_no_fault_of_the_gateway(gateway: FuzzedGateway, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "run", str(tmp_path / "schema.json"), "--url", gateway.url,
        "--checks", "not_a_server_error,content_type_conformance,response_schema_conformance", "--mode", "all",
        "--max-examples", "300", "--seed", "1", "--generation-database", "none", "--no-color",
    ]  # fmt: skip
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=800)
    print(found.stdout[-6000:], found.stderr[-2000:])
    print(gateway.statuses)
    assert found.returncode == 0
    assert gateway.faults == []
    # Calls were answered on each interface, and refused.
    for path in SCHEMA["paths"]:
        assert {200, 400} <= {status for (one, status) in gateway.statuses if one == path}, path


# What must succeed in each scenario that is about tools, and what the client prints. The other scenarios are about
# logins and about questions to a user: the example has neither.
SCENARIOS = {
    "initialize": ({"mcp-client-initialization"}, "test-server"),
    "tools_call": ({"tool-add-numbers"}, "The sum of 20 and 22 is 42"),
    # A third check asks the clock.
    "sse-retry": (
        {"client-sse-graceful-reconnect", "client-sse-last-event-id"}, "Reconnection test completed successfully"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_examples_client_of_mcp_conforms(name: str, tmp_path: Path) -> None:
    checked, printed = SCENARIOS[name]
    programs = Path(sys.prefix) / "node_modules" / ".bin"
    client = f"{sys.executable} {Path(__file__).with_name('mcp_client.py')}"
    command = [programs / "conformance", "client", "--scenario", name, "--command", client, "--output-dir", tmp_path]
    found = subprocess.run(
        command, env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    print(found.stdout[-6000:], found.stderr[-2000:])
    (folder,) = tmp_path.iterdir()
    statuses = {check["id"]: check["status"] for check in json.loads((folder / "checks.json").read_text())}
    assert {statuses.get(check) for check in checked} == {"SUCCESS"}
    assert (folder / "stdout.txt").read_text() == f"{printed}\n"
