"""Updates in every layout against torch's AdamW; schedules; gradients that are not finite."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from megatron_rl.config.settings import Settings
from megatron_rl.ops.adam import OnePassAdamW
from megatron_rl.trainer.mcore.model.gpt import build_model
from megatron_rl.trainer.mcore.session import start_session
from megatron_rl.trainer.mcore.step.optimizer import (
    NonFiniteGradient,
    UpdateResult,
    apply_update,
    build_scheduler,
    force_param_sync,
)
from tests import hf_models
from tests.command_lines import DENSE, parse
from tests.distributed.layouts import Model
from tests.distributed.parity import expected_at
from tests.distributed.training import LAYOUTS, Training, checkpointer, settings_of, training, training_in
from tests.ranks import run_ranks
from tests.truth import Named, error_over_bound, worst_of

pytestmark = pytest.mark.each_change

RATE, DECAY, CLIP, EPSILON, SCALE = 0.125, 0.25, 1.5, 0.1, 0.01
# An epsilon so great that Adam does not turn rounding into whole steps.
ADAM = f"--lr {RATE} --weight-decay {DECAY} --clip-grad {CLIP} --adam-eps {EPSILON} --lr-decay-style constant"
OVERLAPPED = "DP2+overlap"
COMPARED = (
    "TP1", "TP2", "TP2+SP", "PP2", "PP2xVPP2", "DP2", "DP2+distopt", "DP2+overlap", "TP2+distopt", "CP2+distopt",
    "TP1, one pass", "DP2+distopt, one pass",
)  # fmt: skip


def run_updates(names: list[str], folder: Path) -> dict[str, tuple]:
    """Return the weights around two updates, the gradients of both and of one more pass, and the reports."""
    torch.distributed.init_process_group("gloo")
    results = {}
    for name in names:
        layout = name.removesuffix(", one pass")
        with training_with(layout != name, folder, f"{ADAM} {LAYOUTS[layout]}") as trained:
            assert isinstance(trained.optimizer.optimizer, OnePassAdamW) is (layout != name)
            weights, gradients, reports = [trained.parameters()], [], []
            for _ in range(2):
                trained.accumulate()
                gradients.append(trained.gradients())
                reports.append(apply_update(trained.optimizer, trained.scheduler, trained.wrapped, SCALE))
                stale = name == OVERLAPPED and differ_over_replicas(trained)
            trained.accumulate()
            gradients.append(trained.gradients())
            results[name] = (*_after(trained, weights), gradients, reports, stale)
    return results


@contextlib.contextmanager
def training_with(one_pass: bool, folder: Path, words: str) -> Iterator[Training]:
    """Set up the training with the optimizer that a GPU has, or with torch's own."""
    settings = settings_of(folder, words)
    on_a_gpu = dataclasses.replace(settings.model, elementwise_backend="triton")
    of_optimizer = dataclasses.replace(settings, model=on_a_gpu) if one_pass else settings
    with start_session(settings) as session:
        yield training_in(session, of_optimizer, build_model=lambda _: build_model(settings))


def _after(trained: Model, weights: list) -> tuple:
    """Return the weights after an update; synchronizing must change nothing, for the pass has gathered everything."""
    passed = trained.parameters()
    force_param_sync(trained.wrapped)
    weights.append(trained.parameters())
    return weights, passed


def differ_over_replicas(trained: Model) -> bool:
    """Check that parameters are stale after a step, and up to date after they are gathered."""
    mine = trained.weights.fingerprint()
    force_param_sync(trained.wrapped)
    return mine != trained.weights.fingerprint()


def by_hand(weights: Named, gradients: Sequence[Named], dtype: torch.dtype) -> tuple[Named, list[torch.Tensor]]:
    """Return weights and gradients' norms of AdamW in `dtype`, with clipping over whole tensors; norms do not decay."""
    weights = {name: value.to(dtype, copy=True) for name, value in weights.items()}
    groups = [
        {"params": [value for value in weights.values() if value.dim() > 1], "weight_decay": DECAY},
        {"params": [value for value in weights.values() if value.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=RATE, eps=EPSILON)
    norms = []
    for gradient in gradients:
        scaled = {name: value.to(dtype) * SCALE for name, value in gradient.items()}
        norms.append(torch.nn.utils.get_total_norm(scaled.values()))
        assert norms[-1] > CLIP, "the gradient must be one that is clipped"
        for name, value in weights.items():
            value.grad = scaled[name] * (CLIP / (norms[-1] + 1e-6))
        adam.step()
    return weights, norms


def run_bad_gradients(folder: Path, experts: Path, out: Path) -> tuple[list[str], bool, list, list[float], list]:
    """Try an infinite gradient on one replica, float16 with far too great a scale, and experts' gradients alone."""
    torch.distributed.init_process_group("gloo")
    with training(folder, f"{ADAM} {LAYOUTS['DP2+distopt']}") as trained:
        before = trained.weights.fingerprint()
        trained.update()
        moved = trained.weights.fingerprint()
        trained.accumulate()
        if trained.session.rank == 1:
            gradients = trained.wrapped[0].buffers[0].grad_data
            gradients[len(gradients) // 2] = float("inf")
        with pytest.raises(NonFiniteGradient) as caught:
            apply_update(trained.optimizer, trained.scheduler, trained.wrapped, SCALE)
        is_kept = before != moved == trained.weights.fingerprint()
    with training(folder, f"{ADAM} --fp16 --initial-loss-scale 1e6 --hysteresis 1") as trained:
        reports = [trained.update() for _ in range(14)]
        rates = [trained.scheduler.num_steps, sum(report.was_taken for report in reports)]
    with training(folder, f"{ADAM} --fp16 --initial-loss-scale 4 --min-loss-scale 2 --hysteresis 1") as trained:
        assert not trained.update(float("inf")).was_taken
        with pytest.raises(NonFiniteGradient) as at_floor:
            trained.update(float("inf"))
    texts = [str(caught.value), str(at_floor.value)]
    return texts, is_kept, reports, rates, overflow_of_experts(experts, out)


def overflow_of_experts(folder: Path, out: Path) -> list[tuple[list[float], UpdateResult]]:
    """Return all optimizers' loss scales and an update: without an overflow, after one of experts' alone, resumed."""
    words = f"{ADAM} {LAYOUTS['EP2']} --fp16 --initial-loss-scale 256 --hysteresis 1"
    results = []

    def update(trained: Training) -> None:
        scales = [one.get_loss_scale().item() for one in trained.optimizer.chained_optimizers]
        results.append((scales, trained.update()))

    with training(folder, words) as trained:
        update(trained)
    with training(folder, words) as trained:
        trained.accumulate()
        if trained.session.rank == 1:
            trained.wrapped[0].expert_parallel_buffers[0].grad_data[0] = float("inf")
        assert not apply_update(trained.optimizer, trained.scheduler, trained.wrapped, SCALE).was_taken
        checkpointer(trained, save=out).save(1, {})
        update(trained)
    with training(folder, words) as trained:
        checkpointer(trained, load=out).load()
        update(trained)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.draw("qwen3", tmp_path_factory.mktemp("models") / "qwen3")


def test_an_update_is_the_step_of_adam_on_the_sum_of_losses_in_every_layout(folder: Path) -> None:
    results = run_ranks(run_updates, 1, [name for name in COMPARED if name.startswith("TP1")], folder)[0]
    results |= run_ranks(run_updates, 2, [name for name in COMPARED if not name.startswith("TP1")], folder)[0]
    for name, (weights, passed, gradients, reports, stale) in results.items():
        theirs, truth = (by_hand(weights[0], gradients[:2], dtype) for dtype in (torch.float32, torch.float64))
        for tensor, value in weights[1].items():
            assert not torch.equal(value, weights[0][tensor]), f"{name}: {tensor} was not updated"
            assert torch.equal(value, passed[tensor]), f"{name}: a pass left {tensor} stale"
        norms = torch.tensor([report.gradient_norm for report in reports])
        found = {
            "step": worst_of(weights[1], theirs[0], truth[0]),
            "norm": (error_over_bound(norms, torch.stack(theirs[1]), torch.stack(truth[1])), ""),
            "gradients after two updates": expected_at(weights[1], folder).worst_gradient(gradients[2]),
        }
        print(f"{name}: error / bound: {found}")
        assert all(error <= 1 for error, _ in found.values()), name
        assert [report.was_taken for report in reports] == [True, True]
        assert [report.learning_rate for report in reports] == [RATE, RATE]
        assert stale == (name == OVERLAPPED)


def test_a_gradient_that_is_not_finite_ends_every_rank_unchanged_and_float16_finds_its_scale(
    folder: Path, tmp_path: Path
) -> None:
    experts = hf_models.draw("qwen3_moe", tmp_path / "experts")
    for texts, is_kept, reports, (num_steps, num_taken), of_experts in run_ranks(
        run_bad_gradients, 2, folder, experts, tmp_path / "saved"
    ):
        assert "in update 2: nothing was updated" in texts[0]
        assert "the gradients are not finite at --min-loss-scale 2 in update 1: nothing was updated" in texts[1]
        assert is_kept
        assert num_steps == num_taken
        assert 1 < num_taken < len(reports)
        assert not reports[0].was_taken
        assert math.isnan(reports[0].gradient_norm)
        assert reports[-1].was_taken
        assert reports[-1].is_finite
        # One scale for all optimizers: the gradients, and so their norm, do not depend on it.
        assert [scales for scales, _ in of_experts] == [[256.0, 256.0], [128.0, 128.0], [128.0, 128.0]]
        norm = of_experts[0][1].gradient_norm
        assert [report.gradient_norm for _, report in of_experts] == [norm] + [pytest.approx(norm, rel=1e-3)] * 2


def measure_norm(folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the gradient's norm that an update reports, and the gradients; ranks divide the norms over all heads."""
    torch.distributed.init_process_group("gloo")
    with training(folder, f"--lr 1e-3 {LAYOUTS['TP2+SP,EP2,ETP1']}") as trained:
        trained.accumulate()
        gradients = trained.gradients()
        return apply_update(trained.optimizer, trained.scheduler, trained.wrapped, 1.0).gradient_norm, gradients


@pytest.mark.slow
def test_the_gradients_norm_has_the_norms_of_every_ranks_heads(tmp_path: Path) -> None:
    (ours, gradients), _ = run_ranks(measure_norm, 2, hf_models.draw("minimax_m2", tmp_path / "model"))
    squares = {name: value.double().square().sum().item() for name, value in gradients.items()}
    truth = sum(squares.values()) ** 0.5
    of_norms = sum(value for name, value in squares.items() if name.endswith(("q_norm.weight", "k_norm.weight")))
    without = (truth**2 - of_norms / 2) ** 0.5
    print(f"norm {ours:.8g}, by definition {truth:.8g}, without a rank's norms about {without:.8g}")
    assert abs(ours - truth) < 0.05 * (truth - without)


class Groups:
    """An optimizer, as a schedule sees it."""

    def __init__(self, settings: Settings):
        self.config = settings.optimizer
        self.param_groups: list[dict] = [{"wd_mult": 1.0}, {"wd_mult": 0.0}]


def rates(words: str, num_updates: int = 8) -> list[float]:
    settings = parse(*DENSE, "--lr 1.0", words)
    optimizer = Groups(settings)
    schedule = build_scheduler(settings, optimizer, num_updates)
    values = []
    for _ in range(num_updates):
        values.append(optimizer.param_groups[0]["lr"])
        schedule.step(1)
    return values


def test_rates_follow_megatrons_schedules_counted_in_updates() -> None:
    assert rates("--lr-decay-style constant") == [1.0] * 8
    assert rates("") == [1 - step / 8 for step in range(8)]
    assert rates("--min-lr 0.5 --lr-decay-iters 4") == [1.0, 0.875, 0.75, 0.625, 0.5, 0.5, 0.5, 0.5]
    assert rates("--lr-decay-style constant --lr-warmup-iters 4")[:6] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates("--lr-decay-style constant --lr-warmup-fraction 0.25 --lr-warmup-init 0.5")[:4] == [
        0.5,
        0.75,
        1.0,
        1.0,
    ]
    wsd = "--lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 4"
    assert rates(wsd) == [1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_weight_decay_grows_over_all_updates_and_norms_have_none() -> None:
    settings = parse(
        *DENSE, "--lr 1.0 --weight-decay-incr-style linear --start-weight-decay 0.0 --end-weight-decay 1.0"
    )
    optimizer = Groups(settings)
    schedule = build_scheduler(settings, optimizer, 4)
    values = []
    for _ in range(5):
        values.append([group["weight_decay"] for group in optimizer.param_groups])
        schedule.step(1)
    assert values == [[0.0, 0.0], [0.25, 0.0], [0.5, 0.0], [0.75, 0.0], [1.0, 0.0]]
