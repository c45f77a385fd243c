"""Distillation, preferences and the critic beside NeMo-RL's own functions, from the same numbers.

    NEMO_RL=CLONE python -m pytest tests/unit/test_nemo_rl.py

Letters: B responses, L tokens of the longest one, N tokens, V vocabulary.
"""

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional
from unittest import mock

import pytest
import torch

from megatron_rl.algorithm.declaration import CRITIC, OLD_CRITIC, RoleLogProbs
from megatron_rl.algorithm.library.dpo import PreferenceConfig
from megatron_rl.algorithm.objective import PreferenceObjective
from megatron_rl.algorithm.roles.critic import judge
from megatron_rl.algorithm.sequences import Sequences
from megatron_rl.ops.log_probs import TargetRows, VocabularyShard
from megatron_rl.ops.log_probs.divergence import output_divergences
from megatron_rl.types import Divergence

pytestmark = pytest.mark.skipif("NEMO_RL" not in os.environ, reason="make test-clones NEMO_RL=CLONE runs it")

# The files whose functions are called; others need Ray and its like.
FILES = ("algorithms.loss.interfaces", "algorithms.loss.loss_functions", "algorithms.advantage_estimator")
FROM_UTILS = ("masked_mean", "masked_var")
LENGTHS = [3, 5, 7, 1, 4, 4]


class _Absent(types.ModuleType):
    """A module of which only names are imported."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock()


class _Finder:
    """Finds the files that are called in the clone, and an empty module for each other one."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith("nemo_rl"):
            return None
        inner = name.removeprefix("nemo_rl.")
        if inner in FILES:
            file = Path(os.environ["NEMO_RL"], "nemo_rl", *inner.split(".")).with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "nemo_rl.algorithms.utils":
            source = Path(os.environ["NEMO_RL"], "nemo_rl/algorithms/utils.py").read_text()
            vars(module).update(torch=torch, Optional=Optional)
            for name in FROM_UTILS:
                text = f"def {name}(" + source.split(f"\ndef {name}(")[1].split("\n\n\n")[0]
                exec(compile(text, name, "exec"), vars(module))


@pytest.fixture(scope="module")
def nemo() -> Iterator[SimpleNamespace]:
    finder: Any = _Finder()
    sys.meta_path.insert(0, finder)
    yield SimpleNamespace(
        losses=importlib.import_module("nemo_rl.algorithms.loss.loss_functions"),
        advantages=importlib.import_module("nemo_rl.algorithms.advantage_estimator"),
    )
    sys.meta_path.remove(finder)
    for name in [name for name in sys.modules if name.split(".")[0] == "nemo_rl"]:
        del sys.modules[name]


def pad(values_N: torch.Tensor) -> torch.Tensor:
    """Return the responses, [B, L]."""
    return torch.nn.utils.rnn.pad_sequence(values_N.split(LENGTHS), batch_first=True)


MASK = pad(torch.ones(sum(LENGTHS), dtype=torch.float64))


def draw(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_divergences_from_a_teacher_are_those_of_nemo_rl(kind: str, nemo: SimpleNamespace) -> None:
    hidden, weight = (draw(rows * 16, rows).view(rows, 16).requires_grad_() for rows in (11, 50))
    other, others_weight = draw(11 * 16, 1).view(11, 16), draw(50 * 16, 2).view(50, 16)
    policy, teacher = ((one @ rows.T).log_softmax(-1)[None] for one, rows in ((hidden, weight), (other, others_weight)))
    config = SimpleNamespace(kl_type=kind, mixed_kl_weight=0.5, zero_outside_topk=False)
    data = {"input_ids": torch.zeros(1, 12), "token_mask": torch.ones(1, 12), "sample_mask": torch.ones(1)}
    theirs, _ = nemo.losses.DistillationLossFn(config)(policy, teacher, None, data, torch.ones(()), torch.tensor(11.0))
    rows, shard = TargetRows(other, others_weight), VocabularyShard(0, 50)
    targets = torch.zeros(11, dtype=torch.int64)
    found = output_divergences(TargetRows(hidden, weight), targets, [(rows, Divergence(kind))], shard, 1.0, 64)
    compare(found[:, 1].mean(), theirs, hidden, weight)


def test_the_loss_of_pairs_is_that_of_nemo_rl(nemo: SimpleNamespace) -> None:
    count = sum(LENGTHS)
    policy_N, reference_N = draw(count, 3).requires_grad_(), draw(count, 4)
    lengths_S = torch.tensor(LENGTHS)
    sequences_N = torch.arange(len(LENGTHS)).repeat_interleave(lengths_S)
    objective = PreferenceObjective(PreferenceConfig(beta=0.3), max(LENGTHS))
    log_probs, none_N = RoleLogProbs(policy_N, policy_N.detach(), {"reference": reference_N}), torch.zeros(count)
    total, statistics = objective.loss(log_probs, none_N, none_N, sequences_N, lengths_S)
    ours = total / objective.share(count, len(LENGTHS))
    loss = nemo.losses.DPOLossFn(nemo.losses.DPOLossConfig(reference_policy_kl_penalty=0.3))
    # Their reference's log-probs have one more column, and masks a token before the first one.
    shifted = torch.nn.functional.pad
    data = {
        "token_mask": shifted(MASK, (1, 0)),
        "sample_mask": torch.ones(len(LENGTHS)),
        "reference_policy_logprobs": shifted(pad(reference_N), (0, 1)),
    }
    theirs, measured = loss(pad(policy_N), data, torch.tensor(float(len(LENGTHS))), None)
    compare(ours, theirs, policy_N)
    assert measured["accuracy"] == pytest.approx(float(statistics.sums["accuracy"]) / (len(LENGTHS) / 2))


@pytest.mark.parametrize("options", [
    {"gae_lambda": 0.9, "gae_discount": 0.97},
    {"gae_lambda": 0.9, "gae_discount": 1.0, "critic_lambda": 1.0},
    {"gae_lambda": 0.9, "gae_discount": 1.0, "critic_lambda": 0.95, "gae_length_alpha": 0.4},
    {"gae_lambda": 0.9, "gae_discount": 0.97, "critic_clip": 0.2},
])  # fmt: skip
def test_advantages_and_the_loss_of_the_critic_are_those_of_nemo_rl(options: dict, nemo: SimpleNamespace) -> None:
    count = sum(LENGTHS)
    defaults = {"critic_lambda": None, "gae_length_alpha": None, "critic_clip": None, "critic_loss_coef": 1.0}
    config = SimpleNamespace(**defaults | options)
    value_N, old_N, rewards = draw(count, 5).requires_grad_(), draw(count, 6), draw(len(LENGTHS), 7)
    lengths_S = torch.tensor(LENGTHS)
    rewards_N = torch.zeros(count, dtype=torch.float64)
    rewards_N[lengths_S.cumsum(0) - 1] = rewards
    sequences = Sequences(torch.arange(len(LENGTHS)).repeat_interleave(lengths_S), lengths_S, max(LENGTHS))
    others = {CRITIC: value_N, OLD_CRITIC: old_N}
    term = judge(RoleLogProbs(value_N, value_N, others, rewards_N=rewards_N), sequences, config)
    estimator = nemo.advantages.GeneralizedAdvantageEstimator(
        {
            "gae_lambda": config.gae_lambda,
            "gae_gamma": config.gae_discount,
            "normalize_advantages": False,
            "gae_lambda_value": config.critic_lambda,
            "gae_lambda_policy": None,
            "length_adaptive_alpha": config.gae_length_alpha or 0.0,
        },
        SimpleNamespace(use_kl_in_reward=False, reference_policy_kl_penalty=0.0, reference_policy_kl_type="k1"),
    )
    advantages, returns = estimator.compute_advantage(None, rewards, MASK, pad(old_N))
    found = pad(term.advantages_N)
    assert torch.allclose(found, advantages, rtol=1e-6, atol=1e-7)
    loss = nemo.losses.MseValueLossFn(nemo.losses.MseValueLossConfig(cliprange=config.critic_clip))
    data = {
        "token_mask": MASK,
        "sample_mask": torch.ones(len(LENGTHS)),
        "returns": returns,
        "values": pad(old_N),
    }
    theirs, _ = loss(pad(value_N), data, torch.tensor(1.0), torch.tensor(float(count)))
    compare(term.loss_N.sum() / count, theirs, value_N)


def compare(ours: torch.Tensor, theirs: torch.Tensor, *leaves: torch.Tensor) -> None:
    """Check losses and gradients; their means add 1e-8 to what they divide by."""
    assert torch.allclose(ours, theirs, rtol=2e-8)
    slopes = [torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (ours, theirs)]
    for mine, other in zip(*slopes, strict=True):
        assert torch.allclose(mine, other, rtol=1e-7, atol=1e-12)
