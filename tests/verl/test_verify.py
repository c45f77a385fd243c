"""Weight syncs of verl's to a real vLLM: each planted fault is found. `make test-verl` runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT

pytest.importorskip("tensordict", reason="verl has an environment of its own: make test-verl")


@pytest.mark.parametrize(("plant", "num_syncs", "said"), [
    ("nothing", 5, ""),
    ("stale layer", 2, "model.layers.1.mlp.down_proj.base_layer.weight"),
    ("adapter not sent", 4, "qkv_proj.lora_a_stacked.1: "),
])  # fmt: skip
def test_a_fault_of_the_sync_ends_it(plant: str, num_syncs: int, said: str, tmp_path: Path) -> None:
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.verl.synced_run", str(tmp_path), plant],
        cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert sum(line.startswith("synced") for line in ended.stdout.splitlines()) == num_syncs, ended.stderr[-4000:]
    assert (ended.returncode == 0) == (not said), ended.stderr[-4000:]
    assert said in ended.stderr
