"""The probe of a version: tokens whose log-probs engines and the trainer all compute. How far these may differ follows
from the precisions.

The tokens are drawn again for every version, uniformly from the vocabulary, so that over many versions all of a model
is tested. Log-probs are taken at temperature 1, of every token but the first.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_rl.shared.protocol.wire import EngineKind

LEAST_TOKENS = 64
# The share of them that later versions of adapters need: the base was probed with all, and an engine that has started
# again has proved it bit for bit. The spread of eight log-probs (`limit_by_spread`) is that of the model; three or four
# may be close to each other by chance.
_OF_ADAPTERS = 8

_COARSER = ("float64", "float32", "float16", "bfloat16")
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}

# The largest mean difference that is accepted between two programs with the same weights: at least five times what was
# measured on random weights, on which programs differ more than on trained ones. An accelerator may multiply float32
# numbers with fewer bits.
_BOUNDS = {"float32": 1e-3, "float16": 1e-1, "bfloat16": 5e-1}
_BOUND_FLOAT32_DEVICE = 1e-2
# Engines that multiply float32 numbers on CPUs run the same program, on other processors at most.
_AGREEMENT_FLOAT32_CPU = 1e-5
_QUANTIZED = 4.0
# Tokens that are routed to other experts move the mean of a probe farther than the mean of an iteration.
_EXPERTS, _EXPERTS_OF_ITERATION = 4.0, 2.0


# Shares of the spread of the trainer's log-probs. Log-probs of an unrelated model differ from them by the whole spread
# or more, on average.
_OF_SPREAD, _OF_SPREAD_COARSE = 0.5, 0.75


class Difference(NamedTuple):
    """The difference between two programs' log-probs of the same tokens."""

    mean: float
    largest: float


def find_coarsest_dtype(*dtypes: str) -> str:
    """Return the dtype with the fewest bits of precision."""
    return max(dtypes, key=_COARSER.index)


def find_narrower(trained: str, stored: str) -> str:
    """Return the dtype of fewer bytes, which loses nothing that both have; between equals, the one trained in."""
    return stored if _BYTES[stored] < _BYTES[trained] else trained


def can_hold(dtype: str, published: str) -> bool:
    """Check whether numbers of the published dtype keep every bit in this one, so that they can be compared in it."""
    return dtype == published or _BYTES[dtype] > _BYTES[published]


def count_tokens(num_experts: int = 0, num_active: int = 1) -> int:
    """Return enough tokens for each expert of a layer to be chosen by some, if experts are chosen evenly."""
    if num_experts == 0:
        return LEAST_TOKENS
    return max(LEAST_TOKENS, math.ceil(2 * num_experts * math.log(num_experts + 1) / num_active))


def count_later_tokens(first: int, is_base_proved: bool) -> int:
    """Return the number for versions after the first one, which had `first`.

    `is_base_proved` says that versions are adapters of one base, and that each engine proves it bit for bit.
    """
    return min(first, LEAST_TOKENS // _OF_ADAPTERS) if is_base_proved else first


def draw_tokens(version: int, vocab_size: int, count: int = LEAST_TOKENS) -> list[int]:
    stream = np.random.Generator(np.random.Philox(key=version))
    return stream.integers(0, vocab_size, count).tolist()


def measure_difference(engine: Sequence[float], others: Sequence[float]) -> Difference:
    """Compare the log-probs of the tokens that the engine took. It takes a prompt's first ones, which do not depend on
    the rest.
    """
    distances = np.abs(np.asarray(engine, dtype=np.float64) - np.asarray(others[: len(engine)], dtype=np.float64))
    return Difference(float(distances.mean()), float(distances.max()))


def find_bound(kind: EngineKind, *dtypes: str) -> float:
    """Return the largest mean difference accepted; `dtypes` are the trainer's and that of the published weights."""
    dtype = find_coarsest_dtype(kind.dtype, *dtypes)
    is_device = dtype == "float32" and kind.device != "cpu"
    experts = _EXPERTS if kind.has_experts else 1.0
    return (_BOUND_FLOAT32_DEVICE if is_device else _BOUNDS[dtype]) * experts * _quantized(kind)


def limit_by_spread(bound: float, kind: EngineKind, log_probs: Sequence[float]) -> float:
    """Lower a bound that an unrelated model could keep; `log_probs` are the trainer's.

    The bound stays above the rounding of float32.
    """
    values = np.asarray(log_probs, dtype=np.float64)
    spread = float(np.abs(values - np.median(values)).mean()) if len(values) else 0.0
    share = _OF_SPREAD_COARSE if kind.has_experts or kind.is_quantized else _OF_SPREAD
    return min(bound, max(share * spread, _BOUNDS["float32"]))


def find_agreement(kind: EngineKind) -> float:
    """Return the largest mean difference accepted between engines; `kind` is the coarsest of theirs."""
    if (kind.dtype, kind.device) == ("float32", "cpu") and not (kind.has_experts or kind.is_quantized):
        return _AGREEMENT_FLOAT32_CPU
    return find_bound(kind)


def find_allowance(kind: EngineKind) -> float:
    """Return the factor by which an iteration's log-probs may be farther from the trainer's than by rounding."""
    return (_EXPERTS_OF_ITERATION if kind.has_experts else 1.0) * _quantized(kind)


def _quantized(kind: EngineKind) -> float:
    return _QUANTIZED if kind.is_quantized else 1.0
