"""The numbers of a run as curves over its versions, thinned to the points that a chart can show."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.observe.metrics import TIME, flat, number_at, seconds_by_span
from megatron_rl.shared.weights.mapping import ModelSize

MOST_POINTS = 2000
"""The number of points above which a curve is thinned."""
MOST_BARS = 250
"""The number of bars in the chart of times; the iterations of a longer run share bars."""
_DIGITS = 6

Records = Sequence[Mapping[str, Any]]


def collect_curves(records: Records) -> dict[str, dict[str, list[float]]]:
    """Collect every number of the metrics by its flat name: the versions that have it, and its values there.

    The parts of an iteration's time are left out, since `collect_times` has them.
    """
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for record in records:
        times = set(seconds_by_span(record))
        for name, value in flat(record).items():
            group, _, rest = name.partition("/")
            if group == TIME and rest in times:
                continue
            xs, ys = curves.setdefault(name, ([], []))
            xs.append(record["version"])
            ys.append(value)
    return {name: _pack(*thin(xs, ys)) for name, (xs, ys) in curves.items()}


def thin(xs: Sequence[float], ys: Sequence[float], most: int = MOST_POINTS) -> tuple[list[float], list[float]]:
    """Keep the lowest and the highest point of each stretch, so that no peak is lost, and the two ends."""
    count = len(xs)
    if count <= most:
        return list(xs), list(ys)
    kept = {0, count - 1}
    num_stretches = (most - 2) // 2
    for stretch in range(num_stretches):
        places = range(stretch * count // num_stretches, (stretch + 1) * count // num_stretches)
        kept |= {min(places, key=lambda place: ys[place]), max(places, key=lambda place: ys[place])}
    return [xs[place] for place in sorted(kept)], [ys[place] for place in sorted(kept)]


def collect_times(records: Records, most: int = MOST_BARS) -> dict[str, Any]:
    """Collect the time of iterations by part: the mean seconds of each, for stretches of iterations."""
    timed = [(record["version"], seconds_by_span(record)) for record in records]
    timed = [(version, spans) for version, spans in timed if spans]
    names = list(dict.fromkeys(name for _, spans in timed for name in spans))
    per_bar = -(-len(timed) // most) or 1
    stretches = [timed[start : start + per_bar] for start in range(0, len(timed), per_bar)]
    return {
        "first": [stretch[0][0] for stretch in stretches],
        "last": [stretch[-1][0] for stretch in stretches],
        "num": [len(stretch) for stretch in stretches],
        "seconds": {
            name: [_rounded(sum(spans.get(name, 0.0) for _, spans in stretch) / len(stretch)) for stretch in stretches]
            for name in names
        },
    }


def derive_throughput(
    records: Records,
    num_devices: int | None,
    num_engine_devices: int | None,
    size: ModelSize | None,
    peak: float | None,
) -> dict[str, dict[str, list[float]]]:
    """Derive tokens per second and device, and the model FLOPs utilisation if the devices' `peak` is given.

    `peak` is in FLOP/s of one trainer device. Curves that cannot be derived are left out.
    """
    curves: dict[str, tuple[list[float], list[float]]] = {}

    def add(name: str, version: float, value: float | None) -> None:
        if value is not None:
            xs, ys = curves.setdefault(name, ([], []))
            xs.append(version)
            ys.append(value)

    for record in records:
        for name, count in (("trained", num_devices), ("generated", num_engine_devices)):
            rate = number_at(record, TIME, f"{name}_tokens_per_second")
            if rate is not None and count:
                add(f"per_device/{name}_tokens_per_second", record["version"], rate / count)
        if size is not None and peak and num_devices:
            flops, seconds = count_flops(record, size), number_at(record, TIME, "iteration")
            used = None if flops is None or not seconds else flops / (seconds * num_devices * peak)
            add("per_device/model_flops_utilisation", record["version"], used)
    return {name: _pack(*thin(xs, ys)) for name, (xs, ys) in curves.items()}


def count_flops(record: Mapping[str, Any], size: ModelSize) -> float | None:
    """Count the operations that training needs for an iteration's tokens, each prompt once, without padding.

    Forward and backward are 6 for each parameter that a token is multiplied with, and 12 for each token that it sees,
    times the width of attention. Frozen models and recomputation add nothing, since they do not train the model.
    """
    prompt, response = number_at(record, "tokens", "prompt"), number_at(record, "tokens", "response")
    groups, responses = number_at(record, "groups"), number_at(record, "responses", "count")
    if prompt is None or response is None or not groups or not responses:
        return None
    prompt_length, response_length = prompt / groups, response / responses
    seen = prompt * prompt_length / 2 + response * (prompt_length + response_length / 2)
    return 6.0 * size.num_multiplied * (prompt + response) + 12.0 * size.attention_width * seen


def _pack(xs: Sequence[float], ys: Sequence[float]) -> dict[str, list[float]]:
    return {"x": list(xs), "y": [_rounded(value) for value in ys]}


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")
