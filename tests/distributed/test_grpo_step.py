"""Two and four updates of the trainer against the same computed from GRPO's formulas on padded sequences."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
import torch

from tests.distributed.grpo_trials import FAULTS, Seen, run_trials
from tests.distributed.training import WORLD_SIZES
from tests.grpo_problem import ADAM, CONSTANT, KNOWN, OVERLAPPED, PLAIN, SEQUENCE, SGD, Problem, Trial, draw_problem
from tests.grpo_twin import CRITIC, Rules, Tensors, Twin, Update
from tests.ranks import run_ranks
from tests.truth import distance, error_over_bound, mean_over_bound, weighted_over_bound, worst_of

LEAST_EFFECT = 1e-3
# One computation in float32 may round to next to the truth by chance: the weight of a sequence has the errors of all
# its tokens, so all gradients have that one error in common. These are more draws of what rounding may do.
STIRS = (1, 2, 3)
LEAST_CLIPPED = 0.05

# The default is merge, and each prompt once.
ATTENTIONS = ("--no-shared-prompt", "--shared-prompt-backend gather", "--shared-prompt-backend naive")
# Micro-batches of a group, of several, of all; of a part of a group, of one response.
FIRST_TRIALS = [
    Trial("TP2", 4),
    Trial("PP2", 4, roles="separate"),
    Trial("DP2", 2),
    Trial("DP2", 4, is_shuffled=True),
    Trial("PP2xVPP2", 4),
    Trial("CP2", 4, optimizer=OVERLAPPED),
]
TRIALS = [
    *(Trial("TP2", size) for size in (24, 2)),
    *(Trial("PP2", size) for size in (4, 8, 1)),
    *(Trial("DP2", size) for size in (4, 12)),
    # Interleaved stages need a number of micro-batches that the stages divide.
    *(Trial("PP2xVPP2", size) for size in (12, 2)),
    *(Trial("TP2xPP2", size) for size in (4, 8, 2)),
    *(Trial("CP2", size) for size in (4, 24, 1)),
    Trial("CP2xPP2", 4, roles="separate"),
    Trial("DP2xCP2", 4),
    Trial("DP2", 4, PLAIN),
    Trial("DP2", 2, SEQUENCE),
    Trial("DP2", 4, CONSTANT),
    Trial("DP2", 4, optimizer=OVERLAPPED),
    Trial("DP2", 4, optimizer=OVERLAPPED, roles="separate"),
    *(Trial("DP2", 4, attention=flags) for flags in ATTENTIONS),
    Trial("PP2", 4, num_updates=4),
    Trial("TP2", 4, num_updates=4),
    Trial("DP2", 4, num_updates=3),
    *(Trial("DP2", 2, rules) for rules in KNOWN.values()),
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
    *(
        Trial(layout, size, rules)
        for (layout, size), rules in itertools.product((("TP2", 4), ("PP2", 1), ("CP2", 4)), KNOWN.values())
    ),
]
FAULTY = [Trial("DP2", 4, fault=fault) for fault in FAULTS]


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    return draw_problem(tmp_path_factory.mktemp("models"), has_environments=True)


@dataclasses.dataclass(frozen=True)
class Expected:
    """One update, from the formulas in float32 and in float64."""

    theirs: Update
    truth: Update


class Twins:
    """An iteration in both precisions."""

    def __init__(self, problem: Problem, trial: Trial, start: "Twins | None" = None):
        """`start` are those of the same groups by other rules."""
        updates = problem.divided(trial.num_updates).updates
        self._make = functools.partial(Twin, problem.policy, problem.reference, updates, trial.rules)
        starts = [None, None] if start is None else start._twins
        dtypes = (torch.float32, torch.float64)
        self._twins = [self._make(dtype, start=one) for dtype, one in zip(dtypes, starts, strict=True)]
        self.first = self.update(0)
        # The weights after the first update.
        self.stepped = [twin.step() for twin in self._twins]

    def update(self, number: int, weights: Tensors | None = None) -> Expected:
        """Compute an update at the present weights or at those that are given."""
        for twin in self._twins if weights is not None else ():
            twin.load(weights)
        return Expected(*(twin.update(number) for twin in self._twins))

    def rounded_otherwise(self, number: int, weights: Tensors | None, truth: Update) -> Iterator[Expected]:
        """Compute an update in float32 again, with other roundings."""
        for stir in STIRS:
            twin = self._make(torch.float32, stir)
            if weights is not None:
                twin.load(weights)
            yield Expected(twin.update(number), truth)


def remember_twins(problem: Problem) -> Callable[[Trial], Twins]:
    """Return a function that computes the twins of a trial once for all trials with the same rules and updates."""
    known: dict[tuple[Rules, int], Twins] = {}

    def of(trial: Trial) -> Twins:
        key = (trial.rules, trial.num_updates)
        if key not in known:
            starts = (twins for (_, num_updates), twins in known.items() if num_updates == trial.num_updates)
            known[key] = Twins(problem, trial, next(starts, None))
        return known[key]

    return of


@pytest.fixture(scope="module")
def twins(problem: Problem) -> Callable[[Trial], Twins]:
    return remember_twins(problem)


def run(problem: Problem, trials: Sequence[Trial]) -> dict[Trial, list[Seen]]:
    """Run trials grouped by the number of their ranks, one start for each number."""
    results: dict[Trial, list[Seen]] = {}
    for size in sorted({WORLD_SIZES[trial.layout] for trial in trials}):
        of_size = [trial for trial in trials if WORLD_SIZES[trial.layout] == size]
        ordered = sorted(of_size, key=lambda trial: trial.layout)
        results |= run_ranks(run_trials, size, problem, ordered)[0]
    return results


@pytest.fixture(scope="module")
def computed_first(problem: Problem) -> dict[Trial, list[Seen]]:
    return run(problem, FIRST_TRIALS)


@pytest.fixture(scope="module")
def computed(problem: Problem) -> dict[Trial, list[Seen]]:
    return run(problem, [*TRIALS, *FAULTY])


def check(trial: Trial, seen: list[Seen], twins: Twins) -> None:
    """Check that each update, and the step between them, is the twin's at the weights it was made at."""
    if trial.optimizer == SGD:
        error, tensor = worst_of(seen[1].weights, *twins.stepped)
        assert error <= 1, f"{trial}: the step of {tensor}"
    assert len(seen) == trial.num_updates
    for number, one in enumerate(seen):
        weights = one.weights if number else None
        expected = twins.update(number, weights) if number else twins.first
        others = twins.rounded_otherwise(number, weights, expected.truth)
        check_update(f"{trial}, update {number + 1}", one, expected, others)
    # The policy is furthest from the old one at last.
    if trial.rules.loss in ("clip", "gspo", "cispo", "dppo"):
        assert expected.truth.num_clipped / expected.truth.num_tokens >= LEAST_CLIPPED


def check_update(name: str, seen: Seen, expected: Expected, others: Iterable[Expected] = ()) -> None:
    """Check the results of an update; `others` are computed only if the first draw of rounding explains too little."""
    theirs, truth = expected.theirs, expected.truth
    assert abs(truth.means["kl"]) > 0.25, "the reference must be unlike the policy"
    ratios = (update.per_token["ratio"] for update in (theirs, truth))
    assert truth.margin > distance(*ratios), "a token could be clipped on one side only"
    assert all(gradient.any() for gradient in truth.gradients.values())
    for one in itertools.chain([expected], others):
        found = errors(seen, one)
        worst = max(found, key=found.__getitem__)
        print(
            f"{name}: error / bound: {found[worst]:.2f} {worst}, loss {found['loss']:.2f}, "
            f"{truth.num_clipped / truth.num_tokens:.1%} clipped, KL {truth.means['kl']:.2f}"
        )
        if found[worst] <= 1:
            break
    assert found[worst] <= 1, name
    assert seen.sums["targets"] == truth.num_tokens
    for kind in (name for name in truth.means if name.startswith("clipped")):
        assert seen.sums[kind] == round(truth.means[kind] * truth.num_tokens)


def errors(seen: Seen, expected: Expected) -> dict[str, float]:
    """Return errors over their bounds: of gradients and their norm, of the loss, and of means over tokens."""
    theirs, truth = expected.theirs, expected.truth
    error, tensor = worst_of(seen.gradients, theirs.gradients, truth.gradients)
    found = {tensor: error, "norm": norm_over_bound(seen.outcome.gradient_norm, theirs, truth)}
    terms = (theirs.per_token["loss"], truth.per_token["loss"])
    found["loss"] = weighted_over_bound(seen.sums["loss"] / seen.outcome.denominator, truth.loss, *terms)
    for kind in ("ratio", "kl", "entropy", "mismatch", "mismatch_kl", "entropy_policy", "teacher_kl", "critic.loss"):
        if kind not in seen.sums:
            continue
        terms = (theirs.per_token[kind], truth.per_token[kind])
        found[kind] = mean_over_bound(seen.sums[kind] / truth.num_tokens, *terms)
    return found


def norm_over_bound(ours: float, theirs: Update, truth: Update) -> float:
    """Return the error of a norm over its bound: it is off by at most as much as the gradients."""
    whole = [
        torch.cat([value.flatten() for name, value in one.gradients.items() if not name.startswith(CRITIC)])
        for one in (theirs, truth)
    ]
    other = (whole[0] - whole[1]).norm()
    norms = torch.stack([whole[1].norm() + other, whole[1].norm()])
    return error_over_bound(torch.tensor(ours, dtype=torch.float64), *norms)


def effects(seen: Seen, expected: Update) -> list[float]:
    """Return a fault's effects: relative differences of the loss and of every gradient."""
    changed = [
        ((seen.gradients[name] - gradient).abs().max() / gradient.abs().max()).item()
        for name, gradient in expected.gradients.items()
    ]
    return [abs(seen.sums["loss"] / seen.outcome.denominator / expected.loss - 1), *changed]


@pytest.mark.parametrize("trial", FIRST_TRIALS, ids=str)
def test_updates_equal_those_of_the_padded_twin(trial, computed_first, twins) -> None:
    check(trial, computed_first[trial], twins(trial))


@pytest.mark.each_change
@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_updates_equal_those_of_the_padded_twin_in_every_layout_and_packing(trial, computed, twins) -> None:
    check(trial, computed[trial], twins(trial))


@pytest.mark.each_change
@pytest.mark.parametrize("trial", FAULTY, ids=lambda trial: trial.fault)
def test_a_planted_fault_changes_loss_gradients_or_step(trial, computed, twins) -> None:
    expected = twins(trial)
    second = expected.update(1, expected.stepped[1])
    effect = max(
        max(effects(seen, update.truth)) for seen, update in zip(computed[trial], (expected.first, second), strict=True)
    )
    print(f"{trial.fault}: {effect:.3f}")
    assert effect > LEAST_EFFECT


@pytest.mark.slow
def test_updates_equal_those_of_the_padded_twin_in_more_layouts(twins, problem) -> None:
    for trial, seen in run(problem, MORE_TRIALS).items():
        check(trial, seen, twins(trial))
