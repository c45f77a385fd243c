"""The auxiliary losses of routers in updates of the trainer, against the same from their formulas."""

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from megatron.core.utils import get_model_config

from tests.auxiliary_twin import Auxiliary, Coefficients, as_saved, auxiliary, micro_batches
from tests.distributed.grpo_trials import Seen, run_trials
from tests.distributed.layouts import CASES, build, start_session
from tests.distributed.parity import shared_loss, shared_packs
from tests.grpo_problem import GROUP_SIZE, PLAIN, SEQUENCE, Problem, Trial, draw_problem
from tests.grpo_twin import Rules, Tensors, Twin
from tests.ranks import run_ranks
from tests.truth import mean_over_bound, worst_of

pytestmark = pytest.mark.each_change

# The change that counting a micro-batch in another way must make to some gradient.
LEAST_EFFECT = 1e-2
COEFFICIENTS = Coefficients(balancing=0.4, z=0.05)
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EXPERTS_RECOMPUTED = "--recompute-granularity selective --recompute-modules moe"
SCALE = 8.0


def trial(layout: str, size: int = GROUP_SIZE, rules: Rules = PLAIN, more: str = "", **changes) -> Trial:
    return Trial(layout, size, rules, more=f"{COEFFICIENTS.words} {more}".strip(), **changes)


PLAINEST = trial("DP2")
SHUFFLED = trial("DP2", is_shuffled=True)
SEPARATE = trial("PP2", roles="separate")
METERED = [
    trial("DP2", 8, num_updates=1),
    trial("PP2", more=RECOMPUTED, num_updates=1),
    trial("TP2+SP,EP2,ETP1", num_updates=1),
]
TRIALS = [
    PLAINEST,
    SHUFFLED,
    trial("DP2", 2, SEQUENCE),
    trial("DP2", attention="--no-shared-prompt"),
    trial("PP2"),
    trial("PP2", more=RECOMPUTED),
    trial("PP2", more=EXPERTS_RECOMPUTED),
    SEPARATE,
    trial("PP2xVPP2"),
    trial("EP2"),
    trial("CP2"),
    trial("EP2xCP2"),
    *METERED,
]
WITHOUT = [Trial("DP2", GROUP_SIZE, PLAIN), Trial("DP2", GROUP_SIZE, PLAIN, more=Coefficients(0.0, 0.0).words)]


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    return draw_problem(tmp_path_factory.mktemp("models"), "qwen3_moe")


def run(problem: Problem, trials: list[Trial]) -> tuple[dict[Trial, list[Seen]], list[Tensors]]:
    """Run updates on each rank; return their parts, and gradients of sums of losses, without and with a scale."""
    results = run_trials(problem, trials)
    with start_session(CASES["PP2"]) as session:
        gradients = []
        coefficients = {"moe_aux_loss_coeff": COEFFICIENTS.balancing, "moe_z_loss_coeff": COEFFICIENTS.z}
        for scale in (None, lambda loss: loss * SCALE):
            model = build(session, CASES["PP2"], problem.policy, **coefficients)
            get_model_config(model.chunks[0]).grad_scale_func = scale
            model.forward_backward(shared_packs(1), shared_loss)
            gradients.append(model.gradients())
    return results, gradients


@pytest.fixture(scope="module")
def ran(problem: Problem) -> tuple[dict[Trial, list[Seen]], list[Tensors]]:
    trials = sorted([*TRIALS, *WITHOUT], key=lambda trial: trial.layout)
    return run_ranks(run, 2, problem, trials)[0]


@pytest.fixture(scope="module")
def computed(ran) -> dict[Trial, list[Seen]]:
    return ran[0]


@dataclasses.dataclass(frozen=True)
class Formulas:
    """The formulas' values for the first update, in one precision."""

    main: Tensors
    """Gradients without auxiliary losses."""
    auxiliary: Auxiliary

    @property
    def gradients(self) -> Tensors:
        return {name: value + self.auxiliary.gradients[name] for name, value in self.main.items()}


@dataclasses.dataclass(frozen=True)
class Expected:
    """The first update from the formulas in float32 and in float64."""

    theirs: Formulas
    truth: Formulas


@pytest.fixture(scope="module")
def expected(problem: Problem) -> Callable[[Trial], Expected]:
    @functools.cache
    def main(rules: Rules, num_updates: int, dtype: torch.dtype) -> Tensors:
        # Only the first update is compared.
        updates = problem.divided(num_updates).updates[:1]
        twin = Twin(problem.policy, problem.reference, updates, rules, dtype)
        return as_saved(twin.update(0).gradients)

    @functools.cache
    def of(
        rules: Rules, num_updates: int, size: int, is_shared: bool, multiple_of: int, is_even: bool, dtype: torch.dtype
    ) -> Formulas:
        batches = list(micro_batches(problem.divided(num_updates).updates[0], size))
        lengths = [[len(response) for _, responses in batch for response in responses] for batch in batches]
        is_even = is_even or rules.aggregation == "sequence"
        shares = [len(of_batch) if is_even else sum(of_batch) for of_batch in lengths]
        losses = auxiliary(problem.policy, batches, shares, COEFFICIENTS, is_shared, multiple_of, dtype)
        return Formulas(main(rules, num_updates, dtype), losses)

    def of_trial(trial: Trial, is_even: bool = False) -> Expected:
        is_shared = "--no-shared" not in trial.attention
        multiple_of = 2 if "SP" in trial.layout or "CP" in trial.layout else 1
        question = (trial.rules, trial.num_updates, trial.micro_batch_size, is_shared, multiple_of, is_even)
        return Expected(of(*question, torch.float32), of(*question, torch.float64))

    return of_trial


def effect(seen: Tensors, expected: Tensors) -> float:
    """Return the largest difference, over its tensor's largest value."""
    assert seen.keys() == expected.keys()
    return max(((seen[name] - value).abs().max() / value.abs().max()).item() for name, value in expected.items())


@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_an_update_adds_the_auxiliary_losses_of_its_micro_batches_weighted_by_their_shares(trial, computed, expected):
    update = expected(trial)
    error, name = worst_of(computed[trial][0].gradients, update.theirs.gradients, update.truth.gradients)
    without = effect(update.truth.main, update.truth.gradients)
    print(f"{trial}: error / bound: {error:.2f} {name}; without auxiliary losses {without:.1e}")
    assert error <= 1
    assert without > LEAST_EFFECT


def test_equal_shares_or_repeated_prompts_would_give_other_gradients(computed, expected):
    seen = computed[PLAINEST][0].gradients
    alike = effect(seen, expected(PLAINEST, is_even=True).truth.gradients)
    repeated = effect(seen, expected(dataclasses.replace(PLAINEST, attention="--no-shared-prompt")).truth.gradients)
    print(f"alike {alike:.1e}, prompts with each response {repeated:.1e}")
    assert min(alike, repeated) > LEAST_EFFECT


def test_recomputing_layers_changes_no_gradient(computed):
    for update in range(2):
        plain = computed[trial("PP2")][update].gradients
        for more in (RECOMPUTED, EXPERTS_RECOMPUTED):
            assert effect(computed[trial("PP2", more=more)][update].gradients, plain) == 0.0


def test_frozen_roles_add_no_auxiliary_loss(computed):
    # With separate roles the old policy is the policy itself, in passes without gradients.
    fused, separate = computed[trial("PP2")], computed[SEPARATE]
    for one, other in zip(fused, separate, strict=True):
        assert effect(one.gradients, other.gradients) == 0.0
        assert one.metrics == other.metrics


@pytest.mark.parametrize("trial", METERED, ids=str)
def test_metrics_are_means_over_layers_and_micro_batches(trial, computed, expected):
    metrics, update = computed[trial][0].metrics, expected(trial)
    theirs, truth = update.theirs.auxiliary, update.truth.auxiliary
    print(f"{trial}: balancing {truth.balancing.mean():.4f}, z {truth.z.mean():.4f}")
    assert mean_over_bound(metrics["moe_load_balancing_loss"], theirs.balancing, truth.balancing) <= 1
    assert mean_over_bound(metrics["moe_z_loss"], theirs.z, truth.z) <= 1


def test_coefficients_of_zero_change_nothing(computed):
    without, zero = (computed[trial] for trial in WITHOUT)
    for one, other in zip(without, zero, strict=True):
        assert effect(one.gradients, other.gradients) == 0.0
        assert one.metrics == other.metrics
        assert not any(name.startswith("moe_") for name in one.metrics)


def test_scaling_the_loss_scales_its_auxiliary_losses(ran):
    plain, scaled = ran[1]
    assert all(torch.equal(scaled[name], SCALE * value) for name, value in plain.items())
