"""Compare the planner with published figures of clusters: the misses too.

Two kinds of pages are used. verl's have the parts of a synchronous step. The planner takes sampling and training from
them, with lengths that sampling follows from, and predicts the asynchronous step on the same devices. NeMo RL's have
whole steps alone: everything is predicted from data sheets. Values that pages do not give are assumed, and stand here.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path

from benchmarks import report
from megatron_rl.analysis.plan.chips import find_figures
from megatron_rl.analysis.plan.costs import Costs, Schedule, Setting
from megatron_rl.analysis.plan.figures import DeviceSplit, estimate
from megatron_rl.analysis.plan.lengths import Lognormal, Uniform
from megatron_rl.analysis.plan.simulate import simulate
from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.types import Architecture
from tests.ranks import ROOT

_VERL = "https://github.com/volcengine/verl/blob"
VERL_ASYNC = f"{_VERL}/2147009822388b70cda46ab4a27c5400d3d113ed/docs/advance/fully_async.md"
VERL_ONE_STEP = f"{_VERL}/e55d143181568d5232e4c2c6ba0d3a2ea1f7ebcd/docs/advance/one_step_off.md"
NEMO = (
    "https://github.com/NVIDIA-NeMo/RL/blob/06beed91bac98a2c39a19435f6bbbbe71aa45720/docs/about/performance-summary.md"
)
ITERATIONS = 6
# Assumed: the pages give neither prompts nor tails.
PROMPT, SIGMA = Uniform(80, 300), 1.0
RUNNING = 256
_SCHEDULES: tuple[Schedule, Schedule] = ("colocated", "one_step_off")


@dataclasses.dataclass(frozen=True)
class PartsPeer:
    """A synchronous step by its parts, on all devices, and a step of another schedule on the same ones."""

    name: str
    address: str
    trainer_devices: int
    engine_devices: int
    schedule: Schedule
    most_tokens: int
    sampling: float
    old_log_probs: float
    update: float
    step: float
    other_step: float
    """The published seconds of the other schedule."""
    has_old_log_probs: bool
    """A flag for another schedule that computes them too."""
    model: str = "Qwen2.5-Math-7B"
    chip: str = "h20"
    prompts: int = 512
    group_size: int = 16
    engine_tensor: int = 2


@dataclasses.dataclass(frozen=True)
class WholePeer:
    """Steps of two schedules, each on devices of its own; in seconds, and with how models were divided."""

    name: str
    model: str
    most_tokens: int
    mean_tokens: float
    responses: int
    updates: int
    devices: tuple[int, int]
    steps: tuple[float, float]
    training: tuple[DeviceSplit, DeviceSplit]
    """The division, without replicas and engines, which follow from the devices."""
    tokens_per_second: tuple[float, float]
    """Tokens a second, for a device."""
    chip: str = "h100"
    address: str = NEMO


PARTS = [
    PartsPeer("verl, 32 H20", VERL_ASYNC, 16, 16, "async", 28_000, 357.41, 107.71, 313.81, 790.10, 294.77, False),
    PartsPeer("verl, 64 H20", VERL_ASYNC, 32, 32, "async", 28_000, 150.72, 70.26, 133.41, 365.28, 189.26, False),
    PartsPeer("verl, 128 H20", VERL_ASYNC, 64, 64, "async", 28_000, 177.85, 53.92, 113.81, 356.30, 150.63, False),
    PartsPeer("verl, 16 H20, FSDP2", VERL_ONE_STEP, 12, 4, "one_step_off", 20_480, 321, 88, 286, 749, 520, True),
    PartsPeer("verl, 16 H20, Megatron", VERL_ONE_STEP, 12, 4, "one_step_off", 8_192, 207, 119, 344, 699, 566, True),
]
WHOLE = [
    WholePeer(
        "NeMo RL, Llama 3.1 8B", "Llama-3.1-8B", 4096, 1060, 2048, 4, (16, 16), (97.7, 74.6),
        (DeviceSplit(pipeline=2), DeviceSplit(pipeline=2)), (1562, 2161),
    ),
    WholePeer(
        "NeMo RL, Qwen3 32B", "Qwen3-32B", 4096, 3206, 2048, 4, (32, 64), (393, 215),
        (DeviceSplit(tensor=4, pipeline=4, engine_tensor=4),) * 2, (540, 494),
    ),
    WholePeer(
        "NeMo RL, Qwen3 30B-A3B", "Qwen3-30B-A3B", 4096, 3154, 2048, 4, (32, 32), (225, 244),
        (DeviceSplit(tensor=2, expert=8, engine_tensor=4), DeviceSplit(pipeline=2, expert=8, engine_tensor=2)),
        (925, 864),
    ),
    WholePeer(
        "NeMo RL, Qwen3 235B-A22B", "Qwen3-235B-A22B", 8192, 5671, 512, 1, (128, 256), (506, 241),
        (
            DeviceSplit(tensor=2, context=2, expert=16, pipeline=8, engine_tensor=16),
            DeviceSplit(tensor=4, expert=16, pipeline=8, engine_tensor=8),
        ),
        (45.7, 52.2),
    ),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Compared:
    """The gain of the other schedule, tokens a second a device over those of the synchronous one, and its step."""

    name: str
    step: float
    published_step: float
    gain: float
    published_gain: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="two iterations each")
    iterations = 2 if parser.parse_args().tiny else ITERATIONS
    compared = compare(iterations)
    print(f"\n{'':<28}{'step, s':>12}{'published':>11}{'gain':>9}{'published':>11}")
    for one in compared:
        print(f"{one.name:<28}{one.step:>12.0f}{one.published_step:>11.0f}{one.gain:>9.2f}{one.published_gain:>11.2f}")
    errors = [abs(one.gain / one.published_gain - 1) for one in compared]
    steps = [max(one.step, one.published_step) / min(one.step, one.published_step) for one in compared]
    report.finish(
        {
            "gain_error_median": statistics.median(errors),
            "gain_error_worst": max(errors),
            "step_factor_worst": max(steps),
        }
    )


def compare(iterations: int) -> list[Compared]:
    """Compare all of them."""
    return [_compare_parts(peer, iterations) for peer in PARTS] + [_compare_whole(peer, iterations) for peer in WHOLE]


def _compare_parts(peer: PartsPeer, iterations: int) -> Compared:
    devices = peer.trainer_devices + peer.engine_devices
    # A replica is 4 devices, over which the model's parts lie in an unknown way: its speed is fitted.
    split = DeviceSplit(
        tensor=4, replicas=devices // 4, num_engines=devices // peer.engine_tensor, engine_tensor=peer.engine_tensor
    )
    costs = estimate(_read(peer.model), find_figures(peer.chip), split, RUNNING)

    def make(mean: float, costs: Costs, schedule: Schedule, trainer: int, engines: int) -> tuple[Setting, Costs]:
        setting = Setting(
            schedule, peer.prompts, peer.group_size, peer.group_size, PROMPT, Lognormal(mean, SIGMA, peer.most_tokens),
            num_engines=engines // peer.engine_tensor, num_replicas=_divide(peer.prompts, trainer // 4),
            trainer_devices=trainer, engine_devices=engines, staleness=1, is_strict=False, is_shared=False,
        )  # fmt: skip
        return setting, costs

    def sampling(mean: float) -> float:
        result = simulate(*make(mean, costs, "colocated", devices, devices), iterations)
        return statistics.mean(one.generation for one in result.iterations)

    mean = _solve(sampling, peer.sampling, 50, peer.most_tokens / 2)
    trained = simulate(*make(mean, costs, "colocated", devices, devices), iterations).mean()
    slow = (peer.update + peer.old_log_probs) / (trained["busy"] + trained["bubble"])
    rest = max(0.0, peer.step - peer.sampling - peer.old_log_probs - peer.update)
    if not peer.has_old_log_probs:
        slow *= peer.update / (peer.update + peer.old_log_probs)
    # A synchronous step spends the rest on publishing, and on whatever else comes between.
    changed = dataclasses.replace(costs, trainer=costs.trainer.faster(1 / slow), publish=rest)
    other = simulate(*make(mean, changed, peer.schedule, peer.trainer_devices, peer.engine_devices), 2 * iterations)
    step = statistics.mean(one.seconds for one in other.iterations[iterations:])
    return Compared(peer.name, step, peer.other_step, peer.step / step, peer.step / peer.other_step)


def _compare_whole(peer: WholePeer, iterations: int) -> Compared:
    architecture = _read(peer.model)
    uncut = _solve(
        lambda mean: Lognormal(mean, SIGMA, peer.most_tokens).mean, peer.mean_tokens, 50, 100 * peer.most_tokens
    )
    found = []
    for schedule, devices, split in zip(_SCHEDULES, peer.devices, peer.training, strict=True):
        # Assumed: half of the devices sample where they are divided.
        trainer = devices if schedule == "colocated" else devices // 2
        engines = devices if schedule == "colocated" else devices - trainer
        whole = dataclasses.replace(
            split,
            replicas=max(1, trainer // (split.tensor * split.pipeline * split.context)),
            num_engines=engines // split.engine_tensor,
        )
        costs = estimate(architecture, find_figures(peer.chip), whole, RUNNING, num_frozen=1)
        setting = Setting(
            schedule, peer.responses, 1, 1, PROMPT, Lognormal(uncut, SIGMA, peer.most_tokens),
            num_engines=whole.num_engines, num_replicas=_divide(peer.responses // peer.updates, whole.replicas),
            num_stages=split.pipeline, num_updates=peer.updates, trainer_devices=trainer, engine_devices=engines,
        )  # fmt: skip
        found.append(simulate(setting, costs, iterations))
    gain = found[1].tpspd / found[0].tpspd
    published = peer.tokens_per_second[1] / peer.tokens_per_second[0]
    return Compared(peer.name, found[1].seconds, peer.steps[1], gain, published)


def _divide(count: int, most: int) -> int:
    """Return the largest number of replicas up to `most` that the count divides over."""
    return next(number for number in range(max(1, most), 0, -1) if count % number == 0)


def _solve(function: Callable[[float], float], wanted: float, least: float, most: float) -> float:
    """Return where a growing function has that value, nearly."""
    for _ in range(18):
        middle = (least * most) ** 0.5
        least, most = (middle, most) if function(middle) < wanted else (least, middle)
    return (least * most) ** 0.5


def _read(model: str) -> Architecture:
    content = tomllib.loads((ROOT / "tests" / "golden" / "released_models.toml").read_text())[model]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(content))
        return read_architecture(folder)


if __name__ == "__main__":
    main()
