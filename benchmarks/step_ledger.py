"""Count the operators, launches and bytes of a training step without a GPU, and predict its time on an H200.

A step runs as it does on CUDA, from slots to update, on tensors without values (`ledger/platform.py`). Its calls are
weighed with rates that were measured on an H200 (`ledger/costs.py`). The table has steps that were measured there, as
they were predicted from the code that was measured (`ledger/before.json`), and as they are predicted now.

    python -m benchmarks.step_ledger [--tiny | --keep]

`--keep` makes what is counted now the counts to compare with. Do this at the commit that was measured.
"""

import argparse
import collections
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.__main__ import find_commit
from benchmarks.ledger.costs import Costs, predict
from benchmarks.ledger.counting import ATTENTION, Entry, Kind
from benchmarks.ledger.platform import counted_device
from benchmarks.ledger.steps import (
    LARGE,
    MEASURED,
    MIDDLE,
    SMALL,
    SPARSE,
    TINY,
    TINY_SPARSE,
    Step,
    count_layer,
    count_step,
)  # fmt: skip

BEFORE = Path(__file__).parent / "ledger" / "before.json"
COSTS = Costs()


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer, forward and backward."""

    launches: int
    bytes: float
    """Bytes a row of the micro-batch."""

    @classmethod
    def of(cls, entries: Mapping[Entry, int], num_rows: int) -> "Layer":
        """Sum the entries of a layer."""
        return cls(
            sum(number * entry.num_launches for entry, number in entries.items()),
            sum(number * entry.num_bytes for entry, number in entries.items()) / num_rows,
        )


@dataclasses.dataclass(frozen=True)
class Before:
    """Counts of the code that was measured."""

    commit: str
    costs: Mapping[str, object]
    """The costs that seconds were predicted with."""
    seconds: Mapping[str, float]
    """By step, as predicted."""
    layers: Mapping[str, Layer]
    """By step."""

    @classmethod
    def read(cls) -> "Before":
        """Read the kept counts; raise if they were weighed with other costs."""
        kept = json.loads(BEFORE.read_text())
        before = cls(**{**kept, "layers": {name: Layer(**layer) for name, layer in kept["layers"].items()}})
        if before.costs != _costs_in_json():
            raise ValueError(
                f"{BEFORE} was written with other costs than those in costs.py: check out {before.commit} with these "
                "costs, and run `python -m benchmarks.step_ledger --keep` there"
            )
        return before

    def write(self) -> None:
        """Make these the kept counts."""
        BEFORE.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to check that it runs")
    parser.add_argument("--keep", action="store_true", help="keep these counts as those to compare with")
    arguments = parser.parse_args()
    if arguments.keep:
        _count_before(find_commit()).write()
        return
    before = Before.read()
    steps, compared = (MEASURED, (SMALL, MIDDLE, LARGE)) if not arguments.tiny else ((TINY,), (TINY,) * 3)
    with counted_device():
        counts = {step: count_step(step) for step in steps}
        layer_entries = count_layer(compared[1])
        sparse = TINY_SPARSE if arguments.tiny else SPARSE
        of_experts = count_layer(sparse)
    layer = Layer.of(layer_entries, compared[1].num_rows)
    errors = _show_steps(counts, before)
    _show_parts(compared[1], counts[compared[1]])
    _show_layer(compared[1], layer_entries)
    _show_layer(sparse, of_experts)
    _show_bounds(compared, counts, before)
    _show_least_bytes(compared[1], layer_entries, before.layers[str(compared[1])])
    small, middle, large = (before.seconds[str(step)] / predict(counts[step], COSTS).seconds for step in compared)
    report.finish(
        {
            "error_worst": max(errors, default=0.0),
            "launches_layer": layer.launches,
            "bytes_vs_before": layer.bytes / before.layers[str(compared[1])].bytes,
            "predicted_vs_before_small": small,
            "predicted_vs_before_0_6b": middle,
            "predicted_vs_before_4b": large,
        }
    )


def _count_before(commit: str) -> Before:
    with counted_device():
        seconds = {str(step): predict(count_step(step), COSTS).seconds for step in (*MEASURED, TINY)}
        layers = {str(step): Layer.of(count_layer(step), step.num_rows) for step in (MIDDLE, TINY)}
    return Before(commit, _costs_in_json(), seconds, layers)


def _costs_in_json() -> Mapping[str, object]:
    found: Mapping[str, object] = json.loads(json.dumps(dataclasses.asdict(COSTS)))
    return found


def _show_steps(counts: Mapping[Step, Sequence[Entry]], before: Before) -> list[float]:
    """Print a line for each step, and return the errors of the predictions of the code that was measured."""
    errors = []
    print(f"\nSeconds of a step on an H200. `then` is predicted from the code that was measured ({before.commit}).")
    print(f"{'':<50}{'measured':>9}{'then':>8}{'error':>8}{'now':>8}{'host':>8}{'device':>8}{'tokens/s':>10}")
    for step, entries in counts.items():
        now, then = predict(entries, COSTS), before.seconds[str(step)]
        measured, error = "", ""
        if step.measured:
            seconds = step.num_tokens / step.measured
            errors.append(abs(then / seconds - 1))
            measured, error = f"{seconds:.3f}", f"{then / seconds - 1:+.1%}"
        print(
            f"{step!s:<50}{measured:>9}{then:>8.3f}{error:>8}{now.seconds:>8.3f}{now.host:>8.3f}{now.device:>8.3f}"
            f"{step.num_tokens / now.seconds:>10,.0f}"
        )
    return errors


def _show_parts(step: Step, entries: Sequence[Entry]) -> None:
    """Print a step's time on the device and on the host, by part and kind of work."""
    rows: dict[tuple[str, str], list[float]] = collections.defaultdict(lambda: [0.0] * 5)
    for entry in entries:
        own = (1.0, entry.num_launches, entry.num_bytes / 1e9, COSTS.on_device(entry), COSTS.on_host(entry))
        rows[entry.part, entry.kind] = [a + b for a, b in zip(rows[entry.part, entry.kind], own, strict=True)]
    busy = sum(row[3] for row in rows.values())
    print(f"\n{step}: the whole step")
    print(f"{'':<44}{'calls':>9}{'launches':>10}{'GB':>9}{'device ms':>11}{'share':>7}{'host ms':>9}")
    for (part, kind), (calls, launches, moved, device, host) in sorted(rows.items(), key=lambda row: -row[1][3]):
        print(
            f"{f'{part}: {kind}':<44}{calls:>9,.0f}{launches:>10,.0f}{moved:>9.1f}{1e3 * device:>11.1f}"
            f"{device / busy:>7.1%}{1e3 * host:>9.1f}"
        )


def _show_layer(step: Step, entries: Mapping[Entry, int]) -> None:
    """Print the operators of a layer, forward and backward."""
    rows: dict[tuple[str, str], list[float]] = collections.defaultdict(lambda: [0.0] * 5)
    for entry, number in entries.items():
        own = (1.0, entry.num_launches, entry.num_bytes / step.num_rows, COSTS.on_device(entry), COSTS.on_host(entry))
        row = rows[entry.name, entry.kind]
        rows[entry.name, entry.kind] = [a + number * b for a, b in zip(row, own, strict=True)]
    rows["all", ""] = [sum(column) for column in zip(*rows.values(), strict=True)]
    print(f"\n{step}: a layer, forward and backward, {step.num_rows:,} rows; bytes are a row's")
    print(f"{'':<58}{'calls':>6}{'launches':>10}{'bytes':>10}{'device us':>11}{'host us':>9}")
    for (name, kind), (calls, launches, moved, device, host) in sorted(rows.items(), key=lambda row: -row[1][3]):
        print(
            f"{f'{name} ({kind})' if kind else name:<58}{calls:>6,.0f}{launches:>10,.0f}{moved:>10,.0f}"
            f"{1e6 * device:>11,.0f}{1e6 * host:>9,.0f}"
        )


def _show_bounds(steps: Sequence[Step], counts: Mapping[Step, Sequence[Entry]], before: Before) -> None:
    """Print the tokens a second over those of before, and what they would be if costs were others."""
    free = dataclasses.replace(COSTS, operator=0.0, view=0.0, triton=0.0, compiled=0.0)
    cases = {
        "as predicted": (COSTS, tuple(Kind)),
        "a launch of a Triton kernel takes 30 us": (dataclasses.replace(COSTS, triton=30e-6), tuple(Kind)),
        "the host takes no time": (free, tuple(Kind)),
        "products and attention alone": (free, (Kind.PRODUCT, Kind.ATTENTION)),
    }
    print("\nTokens/s over those of the code that was measured")
    print(f"{'':<46}" + "".join(f"{f'{step.model} {step.prompt}/{step.response}':>16}" for step in steps))
    for name, (costs, kinds) in cases.items():
        ratios = []
        for step in steps:
            entries = [entry for entry in counts[step] if entry.kind in kinds]
            ratios.append(before.seconds[str(step)] / predict(entries, costs).seconds)
        print(f"{name:<46}" + "".join(f"{ratio:>16.2f}" for ratio in ratios))


def _show_least_bytes(step: Step, entries: Mapping[Entry, int], before: Layer) -> None:
    """Print the part of a layer's bytes that kinds of work move, over all bytes of before."""
    moved: dict[str, float] = collections.defaultdict(float)
    for entry, number in entries.items():
        kind = entry.part if entry.part == ATTENTION else entry.kind
        moved[kind] += number * entry.num_bytes / step.num_rows / before.bytes
    print("\nBytes of a layer over those of before: ", end="")
    print(", ".join(f"{kind} {part:.3f}" for kind, part in sorted(moved.items(), key=lambda one: -one[1]) if part))


if __name__ == "__main__":
    main()
