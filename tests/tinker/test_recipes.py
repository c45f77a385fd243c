"""Recipes of the cookbook, as they are, train a small model through one service with real vLLM."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tinker import answering
from tests.tinker.model import NAME
from tests.tinker.services import Service, serving

tinker = pytest.importorskip("tinker", reason="Tinker's SDK has an environment of its own: make test-tinker")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]
RANK = 32
"""The rank of recipes that do not ask for one."""
NUM_STEPS = 3
PROBE = list(range(40, 60))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("recipes")
    answering.make(folder / NAME)
    with serving(folder, "--seq-length", "4096", "--lora-rank", str(RANK), "--serve-most-models", "16") as service:
        yield service


def run(service: Service, name: str, log: Path, *words: str) -> tuple[list[dict[str, Any]], str]:
    """Run a recipe; return its metrics of each step, and the path of its last weights."""
    service.run_recipe(name, "chats", f"log_path={log}", f"max_steps={NUM_STEPS}", *words, timeout=1500)
    rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    last = json.loads((log / "checkpoints.jsonl").read_text().splitlines()[-1])
    return rows, last["sampler_path"]


@pytest.fixture(scope="module")
def teacher(service: Service, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Train a teacher by the recipe `sl_basic`; return the path of its weights."""
    log = tmp_path_factory.mktemp("teacher") / "log"
    rows, path = run(service, "sl_basic", log, "learning_rate=5e-3")
    losses = [row["train_mean_nll"] for row in rows if "train_mean_nll" in row]
    assert losses[-1] < losses[0]
    return path


def check_weights_changed(service: Service, path: str) -> None:
    client = service.connect()
    prompt = tinker.ModelInput.from_ints(PROBE)
    before, after = (
        client.create_sampling_client(**one).result().compute_logprobs(prompt).result()
        for one in ({"base_model": NAME}, {"model_path": path})
    )
    assert before[1:] != after[1:]


GSM8K = "tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder"
OF_GROUPS = ["group_size=8", "learning_rate=1e-3", "max_tokens=8"]
OF_MATH = ["env=gsm8k", "groups_per_batch=4", *OF_GROUPS]


@pytest.mark.parametrize(("name", "words"), [
    ("rl_basic", [f"dataset_builder={GSM8K}", "dataset_builder.batch_size=4", "dataset_builder.group_size=8",
                  "dataset_builder.renderer_name=qwen3", f"dataset_builder.model_name_for_tokenizer={NAME}",
                  *OF_GROUPS[1:]]),
    ("math_rl.train", ["loss_fn=ppo", "num_substeps=2", "compute_post_kl=True", "eval_every=2", *OF_MATH]),
    ("math_rl.train", ["loss_fn=cispo", "max_steps_off_policy=1", *OF_MATH]),
    ("verifiers_rl.train", ["vf_env_id=tests.tinker.digits", "renderer_name=qwen3", "groups_per_batch=4", *OF_GROUPS]),
    ("code_rl.train", ["groups_per_batch=4", "eval_every=2", *OF_GROUPS]),
    ("multiplayer_rl.guess_number.train", ["renderer_name=qwen3", "batch_size=2", "eval_every=0", *OF_GROUPS]),
    ("preference.shorter.train", ["batch_size=2", *OF_GROUPS]),
])  # fmt: skip
def test_a_recipe_trains_by_rewards(name, words, service, tmp_path) -> None:
    rows, path = run(service, name, tmp_path / "log", *words)
    steps = [row for row in rows if "grad_norm:mean" in row]
    print(name, [(row["env/all/reward/total"], row["grad_norm:mean"]) for row in steps])
    assert len(steps) == NUM_STEPS
    assert all(row["grad_norm:mean"] > 0 for row in steps)
    if name == "code_rl.train":
        # Some answers call the tool, and have a second turn.
        assert max(row["env/all/turns_per_episode"] for row in steps) > 1
    check_weights_changed(service, path)


def test_a_recipe_trains_by_preferences(service, tmp_path) -> None:
    rows, path = run(service, "preference.dpo.train", tmp_path / "log", "batch_size=8", "learning_rate=1e-3")
    losses = [row["dpo_loss"] for row in rows if "dpo_loss" in row]
    assert len(losses) == NUM_STEPS
    assert losses[0] == pytest.approx(math.log(2), abs=1e-3)
    assert losses[-1] < losses[0]
    check_weights_changed(service, path)


def test_a_recipe_distills_a_teacher(service, teacher, tmp_path) -> None:
    words = ["dataset=tulu3", f"teacher_model={NAME}", f"teacher_checkpoint={teacher}", f"lora_rank={RANK}"]
    words += ["groups_per_batch=4", "compute_post_kl=True", "renderer_name=qwen3_disable_thinking", *OF_GROUPS]
    rows, path = run(service, "distillation.on_policy_distillation", tmp_path / "log", *words)
    steps = [row for row in rows if "teacher_kl" in row]
    assert len(steps) == NUM_STEPS
    assert all(row["teacher_kl"] > 0 and row["grad_norm:mean"] > 0 for row in steps)
    check_weights_changed(service, path)
