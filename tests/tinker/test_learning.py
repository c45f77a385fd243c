"""The cookbook's RL loop, as it is, teaches a model the demo's task through the service."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.tinker import learned_loop
from tests.tinker.model import NAME
from tests.tinker.services import serving

tinker = pytest.importorskip("tinker", reason="Tinker's SDK has an environment of its own: make test-tinker")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]
RANK, NUM_STEPS = 32, 40


def test_the_rl_loop_learns_to_carry(tmp_path: Path) -> None:
    learned_loop.make(tmp_path / NAME)
    flags = [
        "--seq-length",
        "96",
        "--lora-rank",
        str(RANK),
        "--micro-batch-size",
        "64",
        "--rollout-max-num-seqs",
        "256",
    ]
    with serving(tmp_path, *flags) as service:
        words = [f"lora_rank={RANK}", f"max_steps={NUM_STEPS}", "batch_size=64", "group_size=16", "max_tokens=10"]
        words += ["learning_rate=2e-3", "loss_fn=importance_sampling", "save_every=0", f"log_path={tmp_path}/log"]
        printed = service.run_recipe("rl_loop", "additions", *words, timeout=3000)
        (path,) = set(re.findall(r"tinker://\S+/sampler_weights/final", printed))
        rewards = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
        client = service.connect()
        before = measure(client.create_sampling_client(base_model=NAME).result())
        after = measure(client.create_sampling_client(model_path=path).result())
    print(f"right before {before:.3f}, after {after:.3f}; rewards {[one['reward/total'] for one in rewards]}")
    assert before < 0.5
    assert after >= 0.9


def measure(sampler: object) -> float:
    """Return the share of held-out problems that one sample each answers."""
    words, rows = learned_loop.make_words(), learned_loop.list_rows()["test"]
    params = tinker.SamplingParams(max_tokens=10, seed=1, stop=[words.eos_token_id])
    futures = []
    for row in rows:
        prompt = tinker.ModelInput.from_ints(words.encode(learned_loop.render(row["question"])))
        futures.append(sampler.sample(prompt=prompt, num_samples=1, sampling_params=params))
    answers = [words.decode(one.result().sequences[0].tokens) for one in futures]
    wanted = [f"\\boxed{{{row['answer'].removeprefix('#### ')}}}{words.eos_token}" for row in rows]
    return float(np.mean([found == one for found, one in zip(answers, wanted, strict=True)]))
