"""Replay of routing with vLLM: of the engine's experts, and of the old policy's in a whole run.

A model with experts is as near to vLLM as one without, in half precision, if its routers take vLLM's experts.
"""

import dataclasses
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.shared.protocol.wire import EngineKind, GroupPart, encode_experts, encode_log_probs, encode_tokens
from megatron_rl.shared.records.audit_check import verify
from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.trainer.data.batch import Batch, Batcher
from megatron_rl.trainer.loop.mismatch import MismatchBounds
from megatron_rl.trainer.mcore.model.replay import replay_routing
from tests import hf_models
from tests.distributed.layouts import CASES, build, start_session
from tests.e2e import loop
from tests.e2e.routed_vllm import LENGTH, NUM_PROMPTS, NUM_RESPONSES
from tests.ranks import run_ranks
from tests.sidecar.vllm_models import SIZES
from tests.unit.test_slots import response, slot

pytestmark = pytest.mark.slow

BF16 = EngineKind(dtype="bfloat16")
SHAPE = {**SIZES, "num_hidden_layers": 4}


def sample(folder: Path, out: Path) -> dict[str, np.ndarray]:
    command = [sys.executable, "-m", "tests.e2e.routed_vllm", str(folder), "bfloat16", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(np.load(out))


def make_batch(folder: Path, found: dict[str, np.ndarray], shift: int) -> Batch:
    """Make the micro-batch of what vLLM sampled; `shift` moves the experts of each sequence by some tokens."""
    architecture = read_architecture(folder)
    parts = []
    for prompt in range(NUM_PROMPTS):
        tokens = found[f"prompt.{prompt}"]
        names = [f"{prompt}.{number}" for number in range(NUM_RESPONSES)]
        responses = [
            msgspec.structs.replace(
                response(LENGTH, 0.0),
                tokens=encode_tokens(found[f"tokens.{name}"]),
                log_probs=encode_log_probs(found[f"log_probs.{name}"]),
            )
            for name in names
        ]
        part = GroupPart(
            prompt_index=prompt, row="", prompt_tokens=encode_tokens(tokens), first_response=0, responses=responses,
            rewards=[0.0] * len(names),
        )  # fmt: skip
        if architecture.experts is not None:
            known = [np.roll(lay_out(found, name, architecture.num_layers), shift, axis=0) for name in names]
            part = msgspec.structs.replace(
                part,
                responses=[
                    msgspec.structs.replace(one, experts=encode_experts(rows[len(tokens) :]))
                    for one, rows in zip(responses, known, strict=True)
                ],
                prompt_experts=encode_experts(known[0][: len(tokens)]),
            )
        parts.append(part)
    replayed = None if architecture.experts is None else architecture
    return Batcher(lambda part: np.zeros(NUM_RESPONSES), replayed=replayed).batch(slot(parts=parts))


def lay_out(found: dict[str, np.ndarray], name: str, num_layers: int) -> np.ndarray:
    layers = {layer: found[key] for layer in range(num_layers) if (key := f"experts.{name}.{layer}") in found}
    (some, *_) = layers.values()
    return np.stack([layers.get(layer, np.zeros_like(some)) for layer in range(num_layers)], axis=1)


def measure(folder: Path, found: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the mean difference between vLLM's and the trainer's log-probs, by what the routers take."""
    has_experts = read_architecture(folder).experts is not None
    torch.distributed.init_process_group("gloo")
    with start_session(CASES["TP1"]) as session:
        model = build(session, CASES["TP1"], folder, bf16=True, params_dtype=torch.bfloat16)
        replay_routing(model.chunks)
        results = {}
        for name, shift in (("replayed", 0), ("off by a token", 1)) if has_experts else (("dense", 0),):
            batch = make_batch(folder, found, shift)
            (log_probs_N,) = model.forward([batch.pack])
            results[name] = float((log_probs_N - batch.engine_log_probs_N).abs().mean())
        if has_experts:
            (log_probs_N,) = model.forward([dataclasses.replace(batch.pack, routing=None)])
            results["own choice"] = float((log_probs_N - batch.engine_log_probs_N).abs().mean())
    return results


def test_the_mismatch_of_replayed_experts_is_within_the_bound_of_a_dense_model(tmp_path: Path) -> None:
    results = {}
    for family in ("qwen3", "glm4_moe"):
        folder = hf_models.draw(family, tmp_path / family, **SHAPE)
        found = sample(folder, tmp_path / f"{family}.npz")
        results |= run_ranks(measure, 1, folder, found)[0]
    print(results)
    bound = MismatchBounds(("bfloat16",), temperature=1.0, replays_routing=True).error(BF16)
    assert results["replayed"] < bound
    assert results["replayed"] < 1.5 * results["dense"]
    assert results["own choice"] > 1.2 * results["replayed"]
    assert results["off by a token"] > 4 * results["own choice"]


def test_a_run_with_vllm_replays_the_old_policys_experts_in_later_updates(tmp_path: Path) -> None:
    world = loop.make_world(tmp_path, family="glm4_moe", head_dim=32, moe_intermediate_size=64)
    run = tmp_path / "run"
    words = world.words(
        "run", rollout_folder=run, rollout_engine="vllm", rollout_num_engines=1, global_batch_size=16,
        grpo_replay_routing=True,
    )  # fmt: skip
    loop.run(run.parent, 1, words)
    rows = [row for row in read_metrics(run) if "fingerprint" in row and "loss" in row]
    assert [row["version"] for row in rows] == [0, 1, 2]
    assert all(row["routing"]["replayed"] > 0 for row in rows)
    report = verify(run)
    assert report.breaches == []
    assert all(count == whole > 0 for count, whole in (item.compared for item in report.iterations))
