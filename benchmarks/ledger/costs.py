"""Weigh the entries of a ledger: the time that a step takes on an H200.

The host and the device each have a clock. A call takes the host some time. The device begins a launch once the host has
made the call and the launch before it is done. A host that reads a number waits for the device.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from benchmarks.ledger.counting import Call, Entry, Kind

_MICROSECOND = 1e-6
# The rows of norms whose rates were measured.
_NARROW, _WIDE = 128, 4096
# By backend, of shapes in docs/kernels.md: the mean number of keys that a row sees, and operations a second forward
# and backward, where the products of pairs that see each other are counted. The smallest shape of that page is left
# out: its time is that of its launches.
_ATTENTION = {
    "triton": ((1000, 384e12, 255e12), (1600, 410e12, 228e12), (2900, 466e12, 284e12), (4100, 484e12, 300e12)),
    "merge": ((1000, 126e12, 153e12), (1600, 168e12, 173e12), (2900, 232e12, 234e12), (4100, 256e12, 246e12)),
    "gather": ((1000, 279e12, 202e12), (1600, 257e12, 151e12), (2900, 305e12, 269e12), (4100, 330e12, 250e12)),
}


@dataclasses.dataclass(frozen=True)
class Costs:
    """The times that a device and its host take. Rates were measured on an H200 unless said otherwise."""

    products: float = 685e12
    """Operations a second of products in bf16; 620 to 750e12 by shape."""
    bytes: float = 4.2e12
    """Bytes a second of operators that read and write whole tensors; 4.1 to 4.3e12."""
    strided_bytes: float = 1.4e12
    """Bytes a second of element-wise operators on tensors with gaps, or of several shapes.

    Fitted to two shares of a profile: rope took 14 %, and the output layer's element-wise operators 24 %.
    """
    norms_forward: tuple[float, float] = (0.7e12, 3.2e12)
    """Bytes a second of torch's norm, for rows of 128 and of 4,096 elements."""
    norms_backward: tuple[float, float] = (0.7e12, 1.8e12)
    """The same of its gradient."""
    kernel: float = 2.5 * _MICROSECOND
    """Seconds of the shortest kernel; assumed."""
    operator: float = 15 * _MICROSECOND
    """Seconds of the host for an operator and the Python around it; fitted to the step of small micro-batches."""
    view: float = 7.5 * _MICROSECOND
    """Seconds of the host for a view or an allocation; assumed to be half an operator's."""
    triton: float = 100 * _MICROSECOND
    """Seconds of the host for a launch of a Triton kernel."""
    compiled: float = 190 * _MICROSECOND
    """Seconds of the host for a call of a function that torch.compile wraps; measured on a CPU."""

    def on_host(self, entry: Entry) -> float:
        """Return the seconds that the host takes for a call."""
        if entry.call is not Call.OPERATOR:
            return self.triton if entry.call is Call.TRITON else self.compiled
        if entry.kind in (Kind.VIEW, Kind.ALLOCATION):
            return self.view
        # An entry of needed work makes no call.
        return self.operator if entry.num_launches else 0.0

    def on_device(self, entry: Entry) -> float:
        """Return the seconds that the device takes for an entry."""
        if entry.kind is Kind.ATTENTION:
            return entry.flops / find_attention_rate(entry) if entry.flops else 0.0
        if not entry.num_launches:
            return 0.0
        moving = entry.num_bytes / self._find_rate(entry)
        return max(moving, entry.flops / self.products, entry.num_launches * self.kernel)

    def _find_rate(self, entry: Entry) -> float:
        """Return the bytes a second of an entry."""
        if entry.kind not in (Kind.NORM_FORWARD, Kind.NORM_BACKWARD):
            return self.strided_bytes if entry.is_strided else self.bytes
        narrow, wide = self.norms_forward if entry.kind is Kind.NORM_FORWARD else self.norms_backward
        width = min(_WIDE, max(_NARROW, entry.width))
        return narrow * (wide / narrow) ** (math.log(width / _NARROW) / math.log(_WIDE / _NARROW))


def find_attention_rate(entry: Entry) -> float:
    """Return the operations a second of attention, as measured where rows see the most similar number of keys."""
    backend, *backward = entry.name.split(", ")
    if backend not in _ATTENTION:
        raise KeyError(f"attention by {backend} has not been timed: add its rates, of {', '.join(_ATTENTION)} now")
    nearest = min(_ATTENTION[backend], key=lambda row: abs(math.log(row[0] / entry.num_keys)))
    return nearest[2] if backward else nearest[1]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of a step, and those that its host and its device are busy."""

    seconds: float
    host: float
    device: float


def predict(entries: Sequence[Entry], costs: Costs) -> Prediction:
    """Predict the time of a step."""
    host = device = 0.0
    for entry in entries:
        host += costs.on_host(entry)
        if seconds := costs.on_device(entry):
            device = max(device, host) + seconds
        if entry.kind is Kind.READ:
            host = max(host, device)
    return Prediction(max(host, device), _sum(map(costs.on_host, entries)), _sum(map(costs.on_device, entries)))


def _sum(seconds: Iterable[float]) -> float:
    return math.fsum(seconds)
