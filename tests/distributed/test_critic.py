"""Updates of policy and critic against PPO's formulas on padded sequences, with advantages by a recursion."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import hf_models
from tests.distributed.test_grpo_step import Twins, check, remember_twins, run
from tests.grpo_problem import PLAIN, SEQUENCE, TRUNCATED, Problem, Trial, draw_problem
from tests.grpo_twin import CRITIC, Judging, Rules, Teaching

pytestmark = pytest.mark.each_change

FORMS = {
    "one lambda": {},
    "two lambdas, discounted, clipped": {"decay": 0.8, "own_decay": 1.0, "discount": 0.95, "clip": 0.05},
    "lambda by length": {"alpha": 0.15, "own_decay": 1.0},
}
OF_MODELS = (
    *(("DP2", 2, form) for form in FORMS),
    ("TP2+SP", 4, "two lambdas, discounted, clipped"),
    ("PP2", 4, "one lambda"),
    ("PP2xVPP2", 4, "two lambdas, discounted, clipped"),
    ("CP2xPP2", 4, "lambda by length"),
)
OF_MODELS_SELDOM = (
    *(("TP2", 4, form) for form in FORMS),
    ("PP2", 4, "lambda by length"),
    ("CP2", 4, "one lambda"),
    ("TP2xPP2", 4, "two lambdas, discounted, clipped"),
)
OF_HEADS = (
    ("TP2+SP", 4, "two lambdas, discounted, clipped"),
    ("PP2xVPP2", 4, "one lambda"),
    ("CP2xPP2", 4, "lambda by length"),
)
OF_HEADS_SELDOM = (
    *(("DP2", 2, form) for form in FORMS),
    ("TP2", 4, "one lambda"),
    ("PP2", 4, "lambda by length"),
    ("CP2", 4, "one lambda"),
    ("TP2xPP2", 4, "two lambdas, discounted, clipped"),
)


def draw_critic(folder: Path, name: str = "llama_biased", **changes: int) -> Path:
    """Draw a critic of another family, width and depth."""
    hf_models.draw(name, folder, seed=4, **{"num_hidden_layers": 5, "hidden_size": 80, **changes})
    file = folder / "model.safetensors"
    width = load_file(file)["model.norm.weight"].shape[0]
    score = 0.3 * torch.randn(1, width, generator=torch.Generator().manual_seed(5))
    save_file({**load_file(file), "score.weight": score}, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def problem(folder: Path) -> Problem:
    return draw_problem(folder, has_environments=True)


@pytest.fixture(scope="module")
def critic(folder: Path) -> Path:
    return draw_critic(folder / "critic")


def rules_of(judging: Judging, rules: Rules = TRUNCATED) -> Rules:
    return dataclasses.replace(rules, advantage="gae", judging=judging)


def trials_of(critic: Path | None, layouts: Sequence[tuple[str, int, str]]) -> list[Trial]:
    """Return the trials of a critic, or of a head on the policy."""
    options = {"coef": 0.7, "learning_rate": 0.25} if critic is None else {}
    rules = {name: rules_of(Judging(critic, **form, **options)) for name, form in FORMS.items()}
    return [Trial(layout, size, dataclasses.replace(rules[form], name=form)) for layout, size, form in layouts]


@pytest.fixture(scope="module")
def computed(problem: Problem, critic: Path):
    """Run the trials of some layouts together, of critics that are models of their own or heads on the policy."""
    return functools.cache(lambda layouts, is_head: run(problem, trials_of(None if is_head else critic, layouts)))


@pytest.fixture(scope="module")
def twins(problem: Problem):
    return remember_twins(problem)


def list_rows() -> Iterator[Any]:
    for kind, layouts, marks in (
        ("model", OF_MODELS, ()),
        ("model", OF_MODELS_SELDOM, pytest.mark.slow),
        ("head", OF_HEADS, ()),
        ("head", OF_HEADS_SELDOM, pytest.mark.slow),
    ):
        for number, row in enumerate(layouts):
            yield pytest.param(kind, layouts, number, marks=marks, id=", ".join(map(str, (kind, *row))))


@pytest.mark.parametrize(("kind", "layouts", "number"), [*list_rows()])
def test_updates_with_a_critic_equal_the_dense_formulas(kind, layouts, number, computed, twins, critic) -> None:
    is_head = kind == "head"
    trial = trials_of(None if is_head else critic, layouts)[number]
    seen = computed(layouts, is_head)[trial]
    check(trial, seen, twins(trial))
    assert not is_head or f"{CRITIC}score.weight" in seen[0].gradients
    assert any(name.startswith(CRITIC) for name in seen[0].gradients)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "head"])
def test_experts_divided_over_ranks_give_a_critic_the_gradients_of_whole_ones(folder, kind) -> None:
    problem = draw_problem(folder / f"experts-{kind}", "qwen3_moe")
    critic = draw_critic(folder / "critic-of-experts", "qwen3_moe") if kind == "model" else None
    rules = rules_of(Judging(critic), PLAIN)
    whole, *divided = run(problem, [Trial(layout, 4, rules) for layout in ("DP2", "EP2", "EP2xCP2")]).values()
    assert any(name.startswith(CRITIC) and gradient.any() for name, gradient in whole[0].gradients.items())
    for seen in divided:
        for name, gradient in whole[0].gradients.items():
            error = (seen[0].gradients[name] - gradient).abs().max()
            assert error <= 1e-5 * gradient.abs().max(), name


@pytest.mark.slow
def test_a_critic_trains_beside_a_teacher_and_as_a_mean_over_responses(problem, critic, folder) -> None:
    teacher = hf_models.draw("qwen3", folder / "teacher", seed=3, hidden_size=48)
    rules = dataclasses.replace(rules_of(Judging(critic), SEQUENCE), teaching=Teaching(teacher, "reverse", top_k=5))
    trials = [Trial("PP2", 4, rules), Trial("PP2xVPP2", 4, rules), Trial("TP2xPP2", 4, rules)]
    of_head = Trial("PP2", 4, dataclasses.replace(rules, judging=Judging(None), entropy=0.1))
    seen, expected = run(problem, [*trials, of_head]), Twins(problem, trials[0])
    for trial in trials:
        check(trial, seen[trial], expected)
    check(of_head, seen[of_head], Twins(problem, of_head, expected))
