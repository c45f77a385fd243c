"""Updates with a teacher of another family, width and depth, against the dense formulas on padded sequences."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tests import hf_models
from tests.distributed.grpo_trials import Seen
from tests.distributed.test_grpo_step import Twins, check, remember_twins, run
from tests.grpo_problem import PLAIN, TRUNCATED, Problem, Trial, draw_problem
from tests.grpo_twin import Teaching

pytestmark = pytest.mark.each_change

FORMS = {
    "sampled": {"divergence": "sampled"},
    "sampled, discounted": {"divergence": "sampled", "discount": 0.8},
    "reverse": {"divergence": "reverse"},
    "reverse, top 7": {"divergence": "reverse", "top_k": 7},
    "forward": {"divergence": "forward"},
    "forward, top 7": {"divergence": "forward", "top_k": 7},
    "jsd": {"divergence": "jsd", "mixture": 0.3},
}
OF_LAYOUTS = [
    *(("DP2", 2, form) for form in FORMS),
    *(("TP2", 4, form) for form in ("sampled", "reverse, top 7", "jsd")),
    *(("TP2+SP", 4, form) for form in ("reverse", "forward, top 7")),
    *(("PP2", 4, form) for form in ("sampled, discounted", "reverse")),
    *(("PP2xVPP2", 4, form) for form in ("sampled", "jsd")),
    *(("CP2", 4, form) for form in ("sampled, discounted", "reverse, top 7", "forward")),
    ("CP2xPP2", 4, "reverse"),
    ("TP2xPP2", 4, "jsd"),
]
SEPARATE = [("TP2", "sampled"), ("PP2xVPP2", "sampled")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def problem(folder: Path) -> Problem:
    return draw_problem(folder, has_environments=True)


@pytest.fixture(scope="module")
def teacher(folder: Path) -> Path:
    """Draw a wider model with tied embeddings, whose five layers no number of stages divides."""
    return hf_models.draw("llama_biased", folder / "teacher", seed=3, num_hidden_layers=5, hidden_size=80)


def trials_of(teacher: Path) -> list[Trial]:
    teachings = {name: Teaching(teacher, **form) for name, form in FORMS.items()}
    # Log-probs of targets can also come from passes of their own.
    return [
        Trial(
            layout,
            size,
            dataclasses.replace(TRUNCATED, teaching=teachings[form], name=form),
            roles="separate" if (layout, form) in SEPARATE else "fused",
        )
        for layout, size, form in OF_LAYOUTS
    ]


@pytest.fixture(scope="module")
def computed(problem: Problem, teacher: Path) -> dict[Trial, list[Seen]]:
    return run(problem, trials_of(teacher))


@pytest.mark.parametrize("number", range(len(OF_LAYOUTS)), ids=lambda number: ", ".join(map(str, OF_LAYOUTS[number])))
def test_updates_with_a_teacher_equal_the_dense_formulas(number, computed, twins, teacher) -> None:
    trial = trials_of(teacher)[number]
    check(trial, computed[trial], twins(trial))


@pytest.fixture(scope="module")
def twins(problem: Problem):
    return remember_twins(problem)


@pytest.fixture(scope="module")
def teacher_with_experts(folder: Path) -> Path:
    return hf_models.draw("glm4_moe", folder / "experts_teacher", seed=3, num_hidden_layers=3)


TWO_TEACHERS = [("DP2", 4), ("PP2", 4), ("PP2xVPP2", 4), ("TP2xPP2", 12), ("CP2xPP2", 4), ("DP2", 12)]


def test_two_teachers_in_one_batch_give_each_group_what_its_own_gives(problem, teacher, folder) -> None:
    """Compare with the dense formulas, and bit for bit with runs that have one of the teachers twice."""
    other = hf_models.draw("qwen3", folder / "other", seed=6, hidden_size=48)
    two = Teaching(teacher, "reverse", top_k=7, other=other)
    twice = [dataclasses.replace(two, folder=one, other=one) for one in (teacher, other)]
    alone = dataclasses.replace(two, other=None)
    sampled = dataclasses.replace(two, divergence="sampled", top_k=None, discount=0.8)
    rules = {one: dataclasses.replace(TRUNCATED, teaching=one) for one in (two, sampled, alone, *twice)}
    trials = {(layout, size, one): Trial(layout, size, rules[one]) for layout, size in TWO_TEACHERS for one in rules}
    seen, twins = run(problem, list(trials.values())), remember_twins(problem)
    for (layout, size, form), trial in trials.items():
        if form in (two, sampled):
            check(trial, seen[trial], twins(trial))
        elif form == twice[0]:
            for update, of_one in zip(seen[trial], seen[trials[layout, size, alone]], strict=True):
                assert all(torch.equal(value, of_one.gradients[name]) for name, value in update.gradients.items())
                assert update.sums["teacher_kl"] == of_one.sums["teacher_kl"]
    for layout, size in TWO_TEACHERS:
        # Only the first update has the same weights in all runs.
        sums, *of_each = (seen[trials[layout, size, one]][0].sums for one in (two, *twice))
        for number, of_one in enumerate(of_each):
            assert sums[f"teacher_kl.t{number}"] == of_one[f"teacher_kl.t{number}"]
            assert sums[f"teacher_targets.t{number}"] == of_one[f"teacher_targets.t{number}"] > 0


ROLE = """
from megatron_rl.algorithm.declaration import LossRole, Term

def compute(log_probs, sequences, settings):
    return Term(advantages_N=-0.7 * sequences.sum_from(log_probs.old_N - log_probs.others["own"], 0.8))

OWN = LossRole("own", is_used=lambda settings: True, compute=compute)
"""


def test_a_role_in_a_file_that_computes_what_a_teacher_does_gives_its_bits(problem, teacher, folder) -> None:
    file = folder / "role.py"
    file.write_text(ROLE)
    taught = dataclasses.replace(TRUNCATED, teaching=Teaching(teacher, **FORMS["sampled, discounted"]))
    own = f"--grpo-role {file}:OWN={teacher}"
    trials = [Trial(layout, 4, taught) for layout in ("DP2", "PP2")]
    trials += [Trial(layout, 4, TRUNCATED, more=own) for layout in ("DP2", "PP2")]
    seen = run(problem, trials)
    for theirs, ours in zip(trials[:2], trials[2:], strict=True):
        for one, other in zip(seen[ours], seen[theirs], strict=True):
            assert all(torch.equal(gradient, other.gradients[name]) for name, gradient in one.gradients.items())


def test_teachers_with_experts_equal_the_dense_formulas(problem, teacher_with_experts) -> None:
    rules = dataclasses.replace(TRUNCATED, teaching=Teaching(teacher_with_experts, "reverse", top_k=5))
    trials = [Trial("PP2", 4, rules), Trial("TP2+SP", 4, rules)]
    seen, expected = run(problem, trials), Twins(problem, trials[0])
    for trial in trials:
        check(trial, seen[trial], expected)


def test_experts_divided_over_ranks_give_the_gradients_of_whole_ones(folder, teacher_with_experts) -> None:
    problem = draw_problem(folder / "experts", "qwen3_moe")
    rules = dataclasses.replace(PLAIN, teaching=Teaching(teacher_with_experts, "reverse", top_k=5))
    whole, *divided = run(problem, [Trial(layout, 4, rules) for layout in ("DP2", "EP2", "EP2xCP2")]).values()
    for seen in divided:
        for name, gradient in whole[0].gradients.items():
            error = (seen[0].gradients[name] - gradient).abs().max()
            assert error <= 1e-5 * gradient.abs().max(), name
