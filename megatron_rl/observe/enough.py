"""How long a run must be before it is judged, and what is said of one that is not.

Pure. Shares of time are judged if the number of iterations that were measured is at least each of these three:

- `LEAST_ITERATIONS`;
- the number that takes `LEAST_SECONDS` together;
- the number that brings the standard error of an iteration's mean time down to `PRECISION`, by the spread of the times.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.observe.trace import Trace

# Fewer have no beginning and no end to compare.
LEAST_ITERATIONS = 8
# A pause of 40 ms, as any operating system makes, is then below 1 % of the time, the smallest bound of a share.
LEAST_SECONDS = 4.0
# Of the mean: bounds are of 5 % and more of the time, and need not be known better.
PRECISION = 0.15
# Fewer have no spread.
_LEAST_TO_SPREAD = 4
# The distance between the quartiles of a normal distribution, in deviations.
_DEVIATIONS_BETWEEN_QUARTILES = 1.349


def describe_lack_of_time(trace: Trace) -> str | None:
    """Say what a trace lacks to be judged; None if it lacks nothing. Its first iteration has been left out."""
    versions = set(trace.versions)
    seconds = [
        window.end - window.begin
        for rank in trace.ranks[:1]
        for window in rank.windows
        if window.version in versions and window.end > window.begin
    ]
    wanted = count_wanted(seconds)
    if len(seconds) >= wanted:
        return None
    times = f" of {statistics.median(seconds):.2g} s" if seconds else ""
    spread = _compute_spread(seconds)
    differing = f", whose times spread by {spread:.0%}" if spread is not None else ""
    return (
        f"too little to judge where the time went: it wants {wanted} iterations after the first, which warms up, and "
        f"has {len(seconds)}{times}{differing}: train for longer (--train-iters)"
    )


def describe_lack_of_records(records: Sequence[Mapping[str, Any]]) -> str | None:
    """Say what the metrics lack to be judged; None if they lack nothing."""
    # Not the last line, which may be an evaluation alone.
    count = sum("reward" in record or "loss" in record for record in records)
    if count >= LEAST_ITERATIONS:
        return None
    return (
        f"too little to judge the metrics: it wants {LEAST_ITERATIONS} iterations, and has {count}: train for longer "
        "(--train-iters)"
    )


def count_wanted(seconds: Sequence[float]) -> int:
    """Count the iterations that a judgement wants, from the times of those that were measured."""
    wanted = LEAST_ITERATIONS
    if seconds:
        wanted = max(wanted, math.ceil(LEAST_SECONDS / statistics.median(seconds)))
    spread = _compute_spread(seconds)
    if spread is not None:
        wanted = max(wanted, math.ceil((spread / PRECISION) ** 2))
    return wanted


def _compute_spread(seconds: Sequence[float]) -> float | None:
    """Compute the deviation over the median; by quartiles, so that a checkpoint or an evaluation does not count."""
    if len(seconds) < _LEAST_TO_SPREAD:
        return None
    first, median, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return (third - first) / _DEVIATIONS_BETWEEN_QUARTILES / median
