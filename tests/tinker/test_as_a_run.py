"""A loop through the service ends in the weights of `pretrain_grpo.py`, bit for bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.shared.chat import read_tokenizer
from megatron_rl.shared.protocol.provenance import derive_group_seed
from megatron_rl.tinker.provenance import read_sequences
from tests.e2e import loop
from tests.tinker.model import NAME
from tests.tinker.services import serving

tinker = pytest.importorskip("tinker", reason="Tinker's SDK has an environment of its own: make test-tinker")
from tinker import types  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore::FutureWarning")]
NUM_ITERATIONS, NUM_PROMPTS, GROUP_SIZE, MAX_TOKENS, RATE = 10, 8, 4, 24, 1e-3
SHARED = {"seq_length": 64, "batch_invariant": True}


def run(world: loop.World) -> list[dict[str, Any]]:
    """Return the rows of the run's metrics."""
    words = world.words(
        "run", rollout_engine="vllm", rollout_num_engines=1, train_iters=NUM_ITERATIONS, lr=RATE, weight_decay=0.0,
        grpo_aggregation="sequence", adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, grpo_kl_beta=0.0,
        rollout_max_tokens=MAX_TOKENS, grpo_prompts_per_step=NUM_PROMPTS, grpo_group_size=GROUP_SIZE, **SHARED,
    )  # fmt: skip
    loop.run(world.folder / "outputs", 1, words, is_forked=False)
    return [row for row in read_metrics(world.folder / "runs" / "run") if "loss" in row]


def list_prompts(world: loop.World) -> dict[int, dict[int, list[int]]]:
    """List the prompts of each iteration of the run, by their numbers in it."""
    tokenizer = read_tokenizer(str(world.model))
    lines, found = world.prompts.read_text().splitlines(), {number: {} for number in range(NUM_ITERATIONS)}
    for event in loop.read_events(world.folder / "runs" / "run"):
        if event["event"] == "group":
            row = json.loads(lines[int(event["row"].split(":")[1]) - 1])
            found[event["version"]][event["prompt"]] = tokenizer.encode(row["prompt"])
    return found


def reward(tokens: list[int]) -> float:
    return float(sum(tokens) % 3)


def make_data(prompt: list[int], sequences: list[Any]) -> list[Any]:
    """Make the data of a group; their weights are the advantages over the lengths, over the number of responses."""
    rewards = np.array([reward(one.tokens) for one in sequences])
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).astype(np.float32)
    data = []
    for sequence, advantage in zip(sequences, advantages, strict=True):
        name, tokens, given = sequence.sequence_id, sequence.tokens, len(prompt) - 1
        weight = float(np.float32(1) / np.float32(len(tokens)) * advantage / np.float32(NUM_PROMPTS * GROUP_SIZE))
        values = {
            "target_tokens": [*prompt[1:], *tokens],
            "logprobs": [0.0] * given + [*sequence.logprobs],
            "advantages": [0.0] * given + [weight] * len(tokens),
        }
        datum = types.Datum(model_input=types.ModelInput.from_ints([*prompt, *tokens[:-1]]), loss_fn_inputs=values)
        prompts, sampled = types.PromptProvenanceSpan, types.SampledProvenanceSpan
        data.append(
            datum.with_provenance(
                model_input=[
                    prompts(sequence_id=name, length=len(prompt)),
                    sampled(sequence_id=name, length=len(tokens) - 1),
                ],
                loss_fn_inputs=[
                    prompts(sequence_id=name, offset=1, length=given),
                    sampled(sequence_id=name, length=len(tokens)),
                ],
            )
        )
    return data


def test_a_loop_through_the_service_ends_in_the_bits_of_a_run(tmp_path: Path) -> None:
    world = loop.make_world(tmp_path, head_dim=32)
    rows = run(world)
    (tmp_path / NAME).parent.mkdir()
    (tmp_path / NAME).symlink_to(world.model, target_is_directory=True)
    with serving(tmp_path, *loop.to_words(SHARED)) as service:
        # The client's only way to train all weights: adapters of rank 0.
        training = service.connect().create_lora_training_client(base_model=NAME, rank=0).result()
        found = [train(training, version, prompts) for version, prompts in list_prompts(world).items()]
    assert found == [(row["gradient_norm"], row["reward"]["mean"]) for row in rows]
    # The weights that sampled, whole.
    sampled = {one.version: one.fingerprint for one in read_sequences(service.folder)[0]}
    assert [*sampled.values()] == [row["fingerprint"] for row in rows]


def train(training: Any, version: int, prompts: dict[int, list[int]]) -> tuple[float, float]:
    """Sample, score and train as the run does in an iteration; return the gradient's norm and the mean reward."""
    sampler = training.save_weights_and_get_sampling_client().result()
    futures = {}
    for index, prompt in sorted(prompts.items()):
        params = types.SamplingParams(max_tokens=MAX_TOKENS, seed=derive_group_seed("run", version, index))
        futures[index] = sampler.sample(
            prompt=types.ModelInput.from_ints(prompt), num_samples=GROUP_SIZE, sampling_params=params
        )
    rewards = []
    for index, future in futures.items():
        sequences = future.result().sequences
        rewards += [reward(one.tokens) for one in sequences]
        # The groups of one request would share what their prompts begin with, and those of a run do not.
        training.forward_backward(make_data(prompts[index], sequences), "importance_sampling")
    adam = types.AdamParams(learning_rate=RATE, beta1=0.9, beta2=0.95, eps=1e-8, grad_clip_norm=1.0)
    return training.optim_step(adam).result().metrics["grad_norm:mean"], float(np.mean(rewards))
