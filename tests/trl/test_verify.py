"""Weight syncs of TRL's to a real vLLM: each planted fault is found, and clean syncs raise no alarm."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT

pytest.importorskip("trl", reason="TRL has an environment of its own: make test-trl")
STEPS = 50


def run(folder: Path, plant: str) -> dict[str, Any]:
    """Run TRL and vLLM's engine together in another process."""
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.trl.synced_run", str(folder), plant, str(STEPS)],
        cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("kind", ["weights", "adapters", "sleep"])
def test_clean_syncs_raise_no_alarm(kind: str, tmp_path: Path) -> None:
    answer = run(tmp_path, kind)
    assert (answer["syncs"], answer["said"]) == (STEPS, "")


# The first sync sends the weights that vLLM has loaded, and adapters that are zero.
@pytest.mark.parametrize(("plant", "num_good", "said"), [
    ("stale layer", 1, "model.layers.1.mlp.down_proj.weight: "),
    ("adapters not sent", 1, "model.layers.0.self_attn.o_proj.weight: "),
    ("sleep drops a buffer", 0, "rotary_emb.cos_sin_cache: "),
    ("sleep drops a weight", 1, "changed after their sync, by sleep or a load: model.norm.weight"),
])  # fmt: skip
def test_a_fault_of_the_sync_is_found_before_a_token_is_sampled(plant, num_good, said, tmp_path) -> None:
    answer = run(tmp_path, plant)
    assert answer["syncs"] == num_good
    assert said in answer["said"]
