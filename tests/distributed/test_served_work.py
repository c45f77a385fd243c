"""The work of a service's clients in every layout, against the formulas of Tinker's losses with transformers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.config.serve import MOST_NAMED, MOST_UNNAMED
from megatron_rl.tinker import work
from megatron_rl.tinker.losses import LOSSES as SERVED
from megatron_rl.tinker.provenance import Claims, mark_own
from megatron_rl.tinker.work import Datum
from megatron_rl.trainer.loop import rank_memory
from tests import hf_models
from tests.distributed.served_trials import WORDS, Noted, Trial, run_trials
from tests.distributed.training import CP2, EP2, LAYOUTS, OVERLAPPED, TP2
from tests.ranks import run_ranks
from tests.supervised_twin import Tensors
from tests.truth import everything_in, worst_of

pytestmark = pytest.mark.each_change

LORA = "--lora-rank 4 --publish-lora adapter"
LOSSES = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3},
    "gspo": {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05},
    "dro": {"beta": 0.3},
}
FLAGS = {
    "TP2+SP": (LAYOUTS["TP2+SP"], "ppo"),
    "PP2": (LAYOUTS["PP2"], "gspo"),
    "PP2xVPP2": (LAYOUTS["PP2xVPP2"], "cross_entropy"),
    "DP2": ("", "cispo"),
    "DP2+overlap": (OVERLAPPED, "importance_sampling"),
    "CP2": (CP2, "dro"),
    "EP2": (EP2, "ppo"),
}


def draw_data(count: int, seed: int) -> list[Datum]:
    """Draw sequences of which some begin alike, some are the begin of others, and one has two targets a position."""
    draw, data = np.random.default_rng(seed), []
    begins = [draw.integers(0, hf_models.VOCAB_SIZE, 6), draw.integers(0, hf_models.VOCAB_SIZE, 9)]
    for number in range(count):
        begin = begins[number % 2][: 3 + number % 5]
        tokens = np.concatenate([begin, draw.integers(0, hf_models.VOCAB_SIZE, number % 4)])
        targets = draw.integers(0, hf_models.VOCAB_SIZE, len(tokens))
        advantages = draw.normal(size=len(tokens)) * (np.arange(len(tokens)) >= len(begin) - 2)
        inputs = {
            "weights": advantages,
            "advantages": advantages,
            # Ratios on both sides of every bound.
            "logprobs": draw.normal(-np.log(hf_models.VOCAB_SIZE), 0.4, len(tokens)),
            "sequence_ratio_mask": (np.arange(len(tokens)) >= len(begin) - 2).astype(float),
        }
        encoded = {name: value.astype("<f4").tobytes() for name, value in inputs.items()}
        data.append(Datum(tokens.astype("<i4").tobytes(), targets.astype("<i4").tobytes(), encoded))
    return data


DATA, OTHERS = draw_data(12, 0), draw_data(5, 1)


def make_pass(model: str, loss: str, data: Sequence[Datum], is_forward_only: bool = False) -> work.Pass:
    marked = [mark_own(datum, Claims((), ()), SERVED[loss]) for datum in data]
    return work.Pass(model=model, data=marked, loss=loss, settings=LOSSES[loss], is_forward_only=is_forward_only)


def step(model: str) -> work.Step:
    return work.Step(model=model, learning_rate=1e-3, beta1=0.8, beta2=0.9, epsilon=1e-6, weight_decay=0.1, clip=0.0)


def create(model: str) -> work.Create:
    return work.Create(model=model, seed=3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: hf_models.draw(name, tmp_path_factory.mktemp(name)) for name in ("qwen3", "qwen3_moe")}


@pytest.fixture(scope="module")
def computed(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """Do all work with one start of the ranks; each list has the results of rank 0."""
    saved = tmp_path_factory.mktemp("saved")
    trials = {}
    for name, (layout, loss) in FLAGS.items():
        folder = folders["qwen3_moe" if name == "EP2" else "qwen3"]
        both = [make_pass("a", loss, DATA), make_pass("a", loss, OTHERS)]
        trials[name] = Trial(folder, layout, [create("a"), both[0], None, step("a"), None, create("a"), *both, None])
    for loss in LOSSES:
        trials[loss] = Trial(folders["qwen3"], "", [create("a"), make_pass("a", loss, DATA), None])
    for name, layout in (("whole", ""), ("TP2", f"{TP2} {LORA}"), ("DP2", f"{OVERLAPPED} {LORA}")):
        first, second = make_pass("a", "ppo", DATA), make_pass("a", "ppo", OTHERS)
        alone = [create("a"), first, step("a"), second, step("a"), None]
        place = str(saved / name)
        other = [create("b"), make_pass("b", "cross_entropy", OTHERS)]
        mixed: list[work.Work | None] = [
            create("a"), *other, first, make_pass("b", "dro", DATA), step("a"), step("b"), second,
            work.Score(name=None, sequences=[DATA[0].tokens]), work.Keep(model="b", name="kept"), step("a"), None,
        ]  # fmt: skip
        loaded: list[work.Work | None] = [
            create("a"), first, step("a"), work.Save(model="a", folder=place), *other,
            work.Load(model="c", folder=place, has_optimizer=True),
            make_pass("c", "ppo", OTHERS), step("b"), step("c"), None,
        ]  # fmt: skip
        # Before a first step too, and with the optimizer's state left out.
        loaded[1:1] = [
            work.Save(model="a", folder=f"{place}-new"),
            work.Load(model="a", folder=f"{place}-new", has_optimizer=len(layout) > 0),
        ]
        for kind, pieces in (("alone", alone), ("mixed", mixed), ("loaded", loaded)):
            trials[f"{name} {kind}"] = Trial(folders["qwen3"], layout, pieces)
    for layout in (LORA, f"{LORA} --bf16"):
        # Each kept sum of gradients is put aside too.
        pieces = [piece for name in "abc" for piece in (create(name), make_pass(name, "ppo", DATA), step(name))]
        pieces += [make_pass(name, "ppo", DATA) for name in "abc"]
        pieces += [work.Keep(model="a", name=str(number)) for number in range(MOST_NAMED + 4 * MOST_UNNAMED)]
        trials[f"four {layout}"] = Trial(folders["qwen3"], layout, [*pieces, create("d"), None])
    return run_ranks(run_trials, 2, trials)[0]


def decode(datum: Datum, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.frombuffer(one, "<f4").copy()).to(dtype) for name, one in datum.inputs.items()}


def formula(loss: str, lp: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute the loss of one sequence as Tinker's documentation writes it."""
    w, q, a, mask = (inputs[name] for name in ("weights", "logprobs", "advantages", "sequence_ratio_mask"))
    settings = LOSSES[loss]
    low, high = settings.get("clip_low_threshold", 0.0), settings.get("clip_high_threshold", 0.0)
    ratio = torch.exp(lp - q)
    if loss == "cross_entropy":
        return -(w * lp).sum()
    if loss == "importance_sampling":
        return -(ratio * a).sum()
    if loss == "ppo":
        return -torch.minimum(ratio * a, torch.clamp(ratio, low, high) * a).sum()
    if loss == "cispo":
        return -(torch.clamp(ratio, low, high).detach() * lp * a).sum()
    if loss == "gspo":
        whole = torch.exp(((lp.detach() - q) * mask).sum() / mask.sum())
        ratio = whole * torch.exp(lp - lp.detach())
        return -torch.minimum(ratio * a, torch.clamp(ratio, low, high) * a).sum()
    return -(lp * a - settings["beta"] / 2 * (lp - q) ** 2).sum()


def compute(folder: Path, loss: str, data: Sequence[Datum], dtype: torch.dtype) -> tuple[list[torch.Tensor], Tensors]:
    """Compute log-probs and gradients of each sequence alone, with transformers."""
    model = hf_models.load(folder, dtype)
    found, total = [], torch.zeros((), dtype=dtype)
    with everything_in(dtype):
        for datum in data:
            tokens, targets = (
                torch.from_numpy(np.frombuffer(one, "<i4").astype(np.int64)) for one in (datum.tokens, datum.targets)
            )
            logits = model(tokens[None]).logits[0].to(dtype)
            lp = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
            inputs = decode(datum, dtype)
            total = total + formula(loss, lp, inputs)
            found.append(lp.detach())
        total.backward()
    return found, hf_models.gradients_of(model)


def check(name: str, folder: Path, loss: str, data: Sequence[Datum], noted: Noted) -> None:
    (_, theirs), (_, truth) = (compute(folder, loss, data, dtype) for dtype in (torch.float32, torch.float64))
    error, tensor = worst_of(noted.gradients, theirs, truth)
    print(f"{name}: {tensor} is {error:.2f} of its bound")
    assert error <= 1


@pytest.mark.parametrize("layout", FLAGS)
def test_gradients_equal_those_of_each_sequence_alone_and_add_up(layout, computed, folders) -> None:
    _, loss = FLAGS[layout]
    folder = folders["qwen3_moe" if layout == "EP2" else "qwen3"]
    _, passed, before, stepped, after, _, _, _, of_both = computed[layout]
    check(layout, folder, loss, DATA, before)
    check(f"{layout}, two passes", folder, loss, [*DATA, *OTHERS], of_both)
    theirs, _ = compute(folder, loss, DATA, torch.float32)
    for own, other in zip(passed.log_probs, theirs, strict=True):
        np.testing.assert_allclose(np.frombuffer(own, "<f4"), other.numpy(), atol=2e-5)
    assert stepped.num_steps == 1
    # A step is that of torch's AdamW, of all parameters.
    places = {name: torch.nn.Parameter(one.clone()) for name, one in before.weights.items()}
    for name, one in places.items():
        one.grad = before.gradients[name]
    torch.optim.AdamW(places.values(), lr=1e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1).step()
    for name, one in places.items():
        torch.testing.assert_close(after.weights[name], one.detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_each_loss_is_its_formula(loss, computed, folders) -> None:
    _, passed, noted = computed[loss]
    check(loss, folders["qwen3"], loss, DATA, noted)
    truth, _ = compute(folders["qwen3"], loss, DATA, torch.float64)
    total = 0.0
    for lp, datum in zip(truth, DATA, strict=True):
        inputs = decode(datum, torch.float64)
        total += float(formula(loss, lp, inputs))
    assert passed.sums["loss"] == pytest.approx(total, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("layout", ["whole", "TP2", "DP2"])
@pytest.mark.parametrize("kind", ["mixed", "loaded"])
def test_a_model_has_the_bits_that_it_has_alone(layout, kind, computed) -> None:
    alone, other = computed[f"{layout} alone"][-1].weights, computed[f"{layout} {kind}"][-1].weights
    assert alone
    assert alone.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in alone.items())


def test_work_that_cannot_be_done_says_why_and_changes_nothing(folders) -> None:
    datum = DATA[0]
    long = Datum(datum.tokens * 40, datum.targets * 40, {name: one * 40 for name, one in datum.inputs.items()})
    wrong = Datum(
        np.full(4, 999, "<i4").tobytes(), datum.targets[:16], {name: one[:16] for name, one in datum.inputs.items()}
    )
    first = make_pass("a", "ppo", DATA)
    plain = [create("a"), first, step("a"), None]
    bad: list[work.Work | None] = [
        create("a"), first, make_pass("a", "ppo", [long]), make_pass("a", "ppo", [wrong]), make_pass("z", "ppo", DATA),
        work.Bring(name="nothing", version=1), step("a"), None,
    ]  # fmt: skip
    found = run_ranks(
        run_trials, 2, {"plain": Trial(folders["qwen3"], "", plain), "bad": Trial(folders["qwen3"], "", bad)}
    )[0]
    reasons = [one.reason for one in found["bad"][2:6]]
    for reason, words in zip(reasons, ("micro-batch", "outside the vocabulary", "no model z", "nothing"), strict=True):
        assert words in reason
    assert all(torch.equal(one, found["bad"][-1].weights[name]) for name, one in found["plain"][-1].weights.items())


@pytest.mark.parametrize("layout", [LORA, f"{LORA} --bf16"])
def test_models_take_the_memory_that_doctor_counts(layout, computed, folders) -> None:
    words = f"--hf-model {folders['qwen3']} {WORDS} {layout} --serve-most-models 4"
    _, _, (counted,) = rank_memory.count(words.split(), 2, None)
    taken = computed[f"four {layout}"][-1].num_bytes
    print(f"{layout}: {taken:,} bytes, counted {counted.host['models']:,}")
    assert taken == pytest.approx(counted.host["models"], rel=0.01)
