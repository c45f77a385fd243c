"""Two and four updates of the trainer against the same computed from GRPO's formulas on padded sequences."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from tests.distributed.grpo_trials import FAULTS, WORLD_SIZES, Seen, run_trials
from tests.grpo_problem import ADAM, CONSTANT, OVERLAPPED, PLAIN, SEQUENCE, SGD, Problem, Trial, draw_problem
from tests.grpo_twin import Rules, Tensors, Twin, Update
from tests.ranks import run_ranks

TOLERANCE = 1e-5
LEAST_EFFECT = 1e-3
LEAST_CLIPPED = 0.05
# Further than rounding moves a ratio.
LEAST_MARGIN = 1e-5

# The default is merge, and each prompt once.
ATTENTIONS = ("--no-shared-prompt", "--shared-prompt-backend gather", "--shared-prompt-backend naive")
# Micro-batches of a group, of several, of all; of a part of a group, of one response.
TRIALS = [
    *(Trial("TP2", size) for size in (4, 24, 2)),
    *(Trial("PP2", size) for size in (4, 8, 1)),
    *(Trial("DP2", size) for size in (4, 12, 2)),
    # Interleaved stages need a number of micro-batches that the stages divide.
    *(Trial("PP2xVPP2", size) for size in (4, 12, 2)),
    *(Trial("TP2xPP2", size) for size in (4, 8, 2)),
    *(Trial("CP2", size) for size in (4, 24, 1)),
    Trial("CP2", 4, optimizer=OVERLAPPED),
    Trial("CP2xPP2", 4, roles="separate"),
    Trial("DP2xCP2", 4),
    Trial("DP2", 4, is_shuffled=True),
    Trial("DP2", 4, PLAIN),
    Trial("DP2", 2, SEQUENCE),
    Trial("DP2", 4, CONSTANT),
    Trial("DP2", 4, optimizer=OVERLAPPED),
    Trial("DP2", 4, optimizer=OVERLAPPED, roles="separate"),
    Trial("PP2", 4, roles="separate"),
    *(Trial("DP2", 4, attention=flags) for flags in ATTENTIONS),
    Trial("PP2", 4, num_updates=4),
    Trial("TP2", 4, num_updates=4),
    Trial("DP2", 4, num_updates=3),
]
MORE_TRIALS = [
    *(
        Trial(layout, size, rules)
        for layout, size, rules in itertools.product(("TP2+SP", "PP2", "TP2", "DP2"), (1, 12), (SEQUENCE, CONSTANT))
    ),
    *(
        Trial(layout, size, optimizer=optimizer)
        for layout, size, optimizer in itertools.product(("DP2", "DP2xPP2"), (2, 12), (ADAM, OVERLAPPED))
    ),
    *(Trial("TP2xPP2", size, CONSTANT) for size in (1, 24)),
    *(Trial("DP2xCP2", size, optimizer=OVERLAPPED) for size in (2, 12)),
    *(Trial("CP2xPP2", size, CONSTANT) for size in (1, 24)),
    *(Trial("CP2", 4, attention=flags) for flags in ATTENTIONS),
]
FAULTY = [Trial("DP2", 4, fault=fault) for fault in FAULTS]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two for a model this small wait for each other more than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    return draw_problem(tmp_path_factory.mktemp("models"))


@dataclasses.dataclass(frozen=True)
class Start:
    """What the twin makes of an iteration's start."""

    twin: Twin
    first: Update
    stepped: Tensors
    """The weights after the first update."""


@pytest.fixture(scope="module")
def start(problem: Problem) -> Callable[[Trial], Start]:
    known: dict[tuple[Rules, int], Start] = {}

    def of(trial: Trial) -> Start:
        key = (trial.rules, trial.num_updates)
        if key not in known:
            twin = Twin(problem.policy, problem.reference, problem.divided(trial.num_updates).updates, trial.rules)
            known[key] = Start(twin, twin.update(0), twin.step())
        return known[key]

    return of


def run(problem: Problem, trials: Sequence[Trial]) -> dict[Trial, list[Seen]]:
    """Trials by the number of their ranks, one start for each number."""
    results: dict[Trial, list[Seen]] = {}
    for size in (2, 4):
        of_size = [trial for trial in trials if WORLD_SIZES[trial.layout] == size]
        ordered = sorted(of_size, key=lambda trial: trial.layout)
        results |= run_ranks(run_trials, size, problem, ordered, timeout=280)[0]
    return results


@pytest.fixture(scope="module")
def computed(problem: Problem) -> dict[Trial, list[Seen]]:
    return run(problem, [*TRIALS, *FAULTY])


def largest(difference: torch.Tensor, of: torch.Tensor) -> float:
    return (difference.abs().max() / of.abs().max()).item()


def differences(seen: Seen, expected: Update) -> dict[str, float]:
    """Relative ones, of the loss and of every gradient."""
    assert seen.gradients.keys() == expected.gradients.keys()
    values = {name: largest(seen.gradients[name] - gradient, gradient) for name, gradient in expected.gradients.items()}
    return {"loss": abs(seen.sums["loss"] / seen.outcome.denominator / expected.loss - 1), **values}


def check(trial: Trial, seen: list[Seen], start: Start) -> None:
    """Each update is the twin's at the weights it was made at, and so is the step between them."""
    if trial.optimizer == SGD:
        for name, weight in start.stepped.items():
            moved = weight - seen[0].weights[name]
            rounding = 2**-23 * weight.abs().max()
            error = (seen[1].weights[name] - weight).abs().max()
            assert error <= TOLERANCE * moved.abs().max() + rounding, f"{trial}: the step of {name}"
    check_update(f"{trial}, update 1", seen[0], start.first)
    assert len(seen) == trial.num_updates
    for number in range(1, trial.num_updates):
        start.twin.load(seen[number].weights)
        expected = start.twin.update(number)
        check_update(f"{trial}, update {number + 1}", seen[number], expected)
    # The policy is furthest from the old one at last.
    assert expected.num_clipped / expected.num_tokens >= LEAST_CLIPPED


def check_update(name: str, seen: Seen, expected: Update) -> None:
    assert expected.means["kl"] > 0.5, "the reference must be unlike the policy"
    assert expected.margin >= LEAST_MARGIN, "a token could be clipped on one side only"
    assert all(gradient.abs().max() > 0 for gradient in expected.gradients.values())
    found = differences(seen, expected)
    worst = max(found, key=found.__getitem__)
    print(
        f"{name}: {found[worst]:.1e} {worst}, loss {found['loss']:.1e}, "
        f"{expected.num_clipped / expected.num_tokens:.1%} clipped, KL {expected.means['kl']:.2f}"
    )
    assert found[worst] <= TOLERANCE, name
    assert seen.outcome.gradient_norm == pytest.approx(expected.gradient_norm, rel=TOLERANCE)
    sums = seen.sums
    assert sums["targets"] == expected.num_tokens
    for kind in ("clipped_low", "clipped_high"):
        assert sums[kind] == round(expected.means[kind] * expected.num_tokens)
    for kind in ("ratio", "kl", "entropy", "mismatch", "mismatch_kl"):
        assert sums[kind] / expected.num_tokens == pytest.approx(expected.means[kind], rel=1e-4), f"{name}: {kind}"
    assert sums["ratio"] / expected.num_tokens == pytest.approx(expected.means["ratio"], abs=TOLERANCE)


@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_updates_are_those_of_the_formulas_in_every_layout_and_packing(trial, computed, start) -> None:
    check(trial, computed[trial], start(trial))


@pytest.mark.parametrize("trial", FAULTY, ids=lambda trial: trial.fault)
def test_a_planted_fault_shows(trial, computed, start) -> None:
    expected = start(trial)
    expected.twin.load(expected.stepped)
    second = expected.twin.update(1)
    effect = max(
        max(differences(seen, update).values())
        for seen, update in zip(computed[trial], (expected.first, second), strict=True)
    )
    print(f"{trial.fault}: {effect:.3f}")
    assert effect > LEAST_EFFECT


@pytest.mark.slow
def test_updates_are_those_of_the_formulas_in_more_layouts(start, problem) -> None:
    for trial, seen in run(problem, MORE_TRIALS).items():
        check(trial, seen, start(trial))
