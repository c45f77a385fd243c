"""Advantages beyond a critic, the rewards that they are made of, the critic's flags and weights.

Whole models are in tests/distributed. Letters: N targets, S responses.
"""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.algorithm.advantages import GroupAdvantages
from megatron_rl.algorithm.declaration import CRITIC, OLD_CRITIC, RoleLogProbs
from megatron_rl.algorithm.roles.critic import judge
from megatron_rl.algorithm.sequences import Sequences
from megatron_rl.algorithm.settings import AlgorithmConfig
from megatron_rl.errors import InputError
from megatron_rl.shared.device_memory import make_look_up, read_parameter_bytes, read_rank_memory
from megatron_rl.shared.protocol.turns import ENVIRONMENT
from megatron_rl.shared.weights.files import Checkpoint
from megatron_rl.shared.weights.mapping import Mapping
from megatron_rl.trainer.data.batch import place_rewards
from megatron_rl.trainer.mcore.step.critic import _load_values
from tests import hf_models
from tests.command_lines import QWEN3, error, folder, parse
from tests.unit.test_turn_credit import REWARDS, TALKS, respond, wire_part

LENGTHS = (5, 1, 300, 0, 129, 128)


def draw_sequences() -> tuple[Sequences, torch.Tensor, torch.Tensor]:
    """Draw values and rewards of responses that end within, at and beyond the blocks of sums."""
    lengths_S = torch.tensor(LENGTHS)
    sequences = Sequences(torch.repeat_interleave(torch.arange(len(LENGTHS)), lengths_S), lengths_S, 320)
    generator = torch.Generator().manual_seed(0)
    values_N, rewards_N = (torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64) for _ in range(2))
    return sequences, values_N, rewards_N


def estimate(values: np.ndarray, rewards: np.ndarray, discount: float, decay: float) -> np.ndarray:
    """Compute a response's advantages as their paper does, each as a sum of its own."""
    after = np.append(values[1:], 0.0)
    beyond = rewards + discount * after - values
    return np.array(
        [
            sum((discount * decay) ** (later - place) * beyond[later] for later in range(place, len(beyond)))
            for place in range(len(beyond))
        ]
    )


@pytest.mark.parametrize("alpha", [None, 0.05, 1.0])
@pytest.mark.parametrize("discount", [1.0, 0.97])
def test_advantages_and_learned_values_are_those_of_the_formula(alpha, discount) -> None:
    sequences, values_N, rewards_N = draw_sequences()
    config = AlgorithmConfig(
        critic="policy", gae_lambda=0.9, gae_discount=discount, critic_lambda=1.0, gae_length_alpha=alpha
    )
    others = {CRITIC: (values_N + 0.1).requires_grad_(), OLD_CRITIC: values_N}
    term = judge(RoleLogProbs(values_N, values_N, others, rewards_N=rewards_N), sequences, config)
    ends = np.cumsum(LENGTHS)[:-1]
    wanted, learned = [], []
    for values, rewards in zip(np.split(values_N.numpy(), ends), np.split(rewards_N.numpy(), ends), strict=True):
        decay = 0.9 if alpha is None else max(0.0, 1 - 1 / (alpha * max(1, len(values))))
        wanted.append(estimate(values, rewards, discount, decay))
        learned.append(values + estimate(values, rewards, discount, 1.0))
    assert term.advantages_N is not None
    assert term.loss_N is not None
    np.testing.assert_allclose(term.advantages_N.numpy(), np.concatenate(wanted), rtol=1e-6, atol=1e-6)
    target = np.concatenate(learned)
    np.testing.assert_allclose(term.loss_N.detach().numpy(), (values_N.numpy() + 0.1 - target) ** 2 / 2, rtol=1e-6)
    assert float(term.sums["critic.away_square"]) == pytest.approx(((target - values_N.numpy()) ** 2).sum())
    # Neither advantages nor what is learned have gradients: only the values that are trained.
    [gradient] = torch.autograd.grad(term.loss_N.sum(), others[CRITIC])
    np.testing.assert_allclose(gradient.numpy(), values_N.numpy() + 0.1 - target, rtol=1e-6, atol=1e-9)
    assert not term.advantages_N.requires_grad


def test_clipped_values_stop_where_they_would_improve_further() -> None:
    sequences = Sequences(torch.zeros(4, dtype=torch.int64), torch.tensor([4]), 8)
    old_N, value_N = torch.zeros(4), torch.tensor([0.05, 0.5, -0.5, 0.5])
    # With these, each target is 1, 1, 1 and -1.
    rewards_N = torch.tensor([0.0, 0.0, 2.0, -1.0])
    config = AlgorithmConfig(critic="policy", critic_clip=0.2, critic_lambda=1.0)
    value_N.requires_grad_()
    term = judge(
        RoleLogProbs(old_N, old_N, {CRITIC: value_N, OLD_CRITIC: old_N}, rewards_N=rewards_N), sequences, config
    )
    assert term.loss_N is not None
    [gradient] = torch.autograd.grad(term.loss_N.sum(), value_N)
    assert gradient.tolist() == pytest.approx([-0.95, 0.0, -1.5, 1.5])
    assert float(term.sums["critic.clipped"]) == 1


def test_rewards_come_at_the_ends_of_turns_and_of_responses() -> None:
    advantages = GroupAdvantages(AlgorithmConfig(advantage="gae", critic="policy", reward_max=2.0))
    totals = [sum(rewards) for rewards in REWARDS]
    placed = place_rewards([wire_part(totals, REWARDS, TALKS)], advantages)
    # The last reply of the third conversation gives back what its total has beyond the bound.
    assert placed.tolist() == [0.0, 1.0, -1.0, 0.0, 0.5, 0.0, 0.0, 2.0, 0.0]
    plain = [respond(("3", [1, 2, 3])), respond((ENVIRONMENT, [4]), ("3", [5]), (ENVIRONMENT, [6]))]
    later = place_rewards([wire_part([9.0, 1.5, -1.0], (), plain, first=1)], advantages)
    assert later.tolist() == [0.0, 0.0, 1.5, -1.0]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    critic = dataclasses.replace(QWEN3, family="llama", qk_layernorm=False, hidden_size=96, num_layers=5)
    return ["--platform cpu --hf-model", folder(tmp_path / "policy", QWEN3), "--critic", folder(tmp_path / "c", critic)]


def test_a_critic_has_its_own_layers_rate_and_optimizer(words) -> None:
    flags = "--lr 1e-5 --critic-lr 1e-4 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    settings = parse(*words, "--algorithm ppo --pipeline-model-parallel-size 2", flags, world_size=2)
    critic = settings.critic
    assert critic is not None
    assert (critic.architecture.num_layers, critic.transformer.hidden_size) == (5, 96)
    assert critic.architecture.is_critic
    assert (critic.optimizer.lr, settings.optimizer.lr) == (1e-4, 1e-5)
    assert (critic.ddp.overlap_grad_reduce, settings.ddp.overlap_grad_reduce) == (False, True)
    assert critic.parallel_sizes == settings.parallel_sizes
    same = parse(*words[:2], "--critic policy --algorithm vapo --gae-length-alpha 0.1").critic
    assert same is not None
    assert same.architecture == dataclasses.replace(QWEN3, tied_embeddings=True, is_critic=True)


def test_a_head_on_the_policy_has_the_policys_architecture_and_its_own_rate_and_optimizer(words) -> None:
    flags = "--critic head --lr 1e-5 --critic-lr 1e-4 --use-distributed-optimizer --overlap-grad-reduce --lora-rank 4"
    settings = parse(*words[:2], "--algorithm ppo --pipeline-model-parallel-size 2", flags, world_size=2)
    head = settings.critic
    assert head is not None
    assert head.architecture == settings.architecture == QWEN3
    assert (head.optimizer.lr, settings.optimizer.lr) == (1e-4, 1e-5)
    assert (head.ddp.overlap_grad_reduce, settings.ddp.overlap_grad_reduce) == (False, True)
    assert (head.lora.rank, settings.lora.rank) == (0, 4)


def test_the_loss_of_a_head_is_weighed(words) -> None:
    sequences, values_N, rewards_N = draw_sequences()
    log_probs = RoleLogProbs(values_N, values_N, {CRITIC: values_N + 0.1, OLD_CRITIC: values_N}, rewards_N=rewards_N)
    settings = parse(*words[:2], "--algorithm ppo --critic head --critic-loss-coef 0.5")
    plain, half = (
        judge(log_probs, sequences, dataclasses.replace(settings.algorithm, critic_loss_coef=coef))
        for coef in (1.0, settings.algorithm.critic_loss_coef)
    )
    assert plain.loss_N is not None
    assert half.loss_N is not None
    assert torch.equal(half.loss_N, plain.loss_N / 2)
    assert float(half.sums["critic.loss"]) == float(plain.sums["critic.loss"])


def test_a_critic_beside_adapters_is_counted_whole(words) -> None:
    of_settings = make_look_up(parse(*words, "--algorithm ppo --lora-rank 4 --bf16"))

    def look_up(name: str) -> Any:
        return None if name.startswith("layout.") else of_settings(name)

    counted = read_rank_memory(look_up, QWEN3, replicas=1)
    assert counted.of_critic == read_parameter_bytes(look_up)
    assert counted.parameter.gradient < counted.of_critic.gradient


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "--critic and --grpo-advantage grpo do not go together: write --grpo-advantage gae"),
        ("--algorithm ppo --tri-model separate", "--critic and --tri-model separate cannot be given together"),
        ("--algorithm ppo --fp16", "--critic and --fp16 cannot be given together: write --bf16"),
        ("--algorithm ppo --grpo-filter-groups-with-same-reward", "the critic tells what is new in equal rewards"),
        ("--algorithm vapo --gae-lambda 0.9", "--gae-lambda 0.9 needs no --gae-length-alpha"),
        ("--algorithm ppo --gae-lambda 1.5", "--gae-lambda 1.5 must be between 0 and 1"),
        ("--algorithm ppo --critic-warmup-iters 4 --train-iters 4", "leaves none of --train-iters 4 to the policy"),
        ("--algorithm ppo --lr 1e-4 --lr-warmup-init 5e-5 --critic-lr 1e-5", "is above the critic's rate, 1e-05"),
        ("--algorithm ppo --critic-warmup-iters -1", "--critic-warmup-iters -1 must be at least 0"),
        ("--algorithm ppo --critic-loss-coef 0.5", "--critic-loss-coef 0.5 needs --critic head: add it, or drop"),
        ("--algorithm ppo --critic head --critic-loss-coef 0", "--critic-loss-coef 0 must be above 0"),
        ("--critic head", "--critic and --grpo-advantage grpo do not go together: write --grpo-advantage gae"),
        ("--algorithm ppo --critic head --tri-model separate", "--critic and --tri-model separate cannot be given"),
        ("--algorithm ppo --critic head --fp16", "--critic and --fp16 cannot be given together: write --bf16"),
        (
            "--algorithm ppo --critic head --lr 1e-4 --lr-warmup-init 5e-5 --critic-lr 1e-5",
            "is above the critic's rate",
        ),
    ],
)
def test_flags_that_do_not_fit_a_critic_are_named(flags, said, words) -> None:
    assert said in error(*words, flags, world_size=8)


def test_flags_and_folders_of_a_critic_that_do_not_fit_are_named(words, tmp_path) -> None:
    policy = words[:2]
    assert "--grpo-advantage gae needs --critic" in error(*policy, "--algorithm ppo")
    for flag in ("--gae-lambda 0.9", "--critic-lr 1", "--critic-clip 0.2", "--gae-discount 0.9"):
        assert f"{flag} needs --critic" in error(*policy, flag)
    assert "--critic must be a folder" in error(*policy, "--algorithm ppo --critic", str(tmp_path / "none"))
    flat = folder(tmp_path / "flat", dataclasses.replace(QWEN3, num_layers=1))
    pipeline = "--algorithm ppo --pipeline-model-parallel-size 2"
    assert "it has 1 layers for 2 stages" in error(*policy, pipeline, "--critic", flat, world_size=2)
    assert "--grpo-group-size 1 must be at least 2: a response is compared" in error(*policy, "--grpo-group-size 1")
    assert parse(*words, "--algorithm ppo --grpo-group-size 1").algorithm.group_size == 1
    few = folder(tmp_path / "few", dataclasses.replace(QWEN3, vocab_size=190))
    assert "its vocabulary has 190 rows, and the policy's 200" in error(*policy, "--algorithm ppo --critic", few)


def test_a_classifier_with_a_bias_or_with_several_numbers_is_refused(tmp_path) -> None:
    chunk = SimpleNamespace(post_process=True, output_weight=lambda: torch.zeros(1, 8))
    for tensors, said in (
        (
            {"score.weight": torch.ones(1, 8), "score.bias": torch.ones(1)},
            "has no score.bias: write a folder without it",
        ),
        ({"score.weight": torch.ones(2, 8)}, r"score.weight has shape \[2, 8\], and a critic's has \[1, 8\]"),
    ):
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(InputError, match=said):
            _load_values(chunk, tmp_path)  # type: ignore[arg-type]


def test_output_layers_of_language_models_and_classifiers_are_no_part_of_a_critic(tmp_path) -> None:
    hf_models.draw("llama_biased", tmp_path)
    file = tmp_path / "model.safetensors"
    architecture = parse("--platform cpu --hf-model", str(tmp_path)).architecture
    mapping = Mapping(dataclasses.replace(architecture, tied_embeddings=True, is_critic=True))
    tensors = load_file(file)
    for changes in (
        {},
        {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1},
        {"score.weight": torch.ones(1, 64)},
    ):
        save_file({**tensors, **changes}, file, metadata={"format": "pt"})
        with Checkpoint(tmp_path) as checkpoint:
            checkpoint.check(mapping)
    save_file({**tensors, "head.weight": torch.ones(1, 64)}, file, metadata={"format": "pt"})
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(InputError, match=r"head.weight is not part of"):
        checkpoint.check(mapping)
