"""Time the kernels beside attention, each beside torch's plain operations and beside a copy of as many bytes.

All of a row take turns. On the CPU the kernels run in Triton's interpreter, and times mean nothing.
"""

import functools
import os
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks import gpu_times
from benchmarks.gpu import launches
from benchmarks.gpu.work import Work
from benchmarks.gpu_times import Passes
from benchmarks.kernels.computation import Computation, Operation, run, weigh
from benchmarks.kernels.others import SETTINGS, list_parts
from benchmarks.kernels.registry import list_timed
from megatron_rl.ops.adam import OnePassAdamW
from megatron_rl.ops.slices import Placed, naive, triton_fused
from megatron_rl.ops.triton_support import refuse_triton

# Seconds that a way may take of a row, and that a row may take with the compilation of its kernels.
SECONDS_OF_A_WAY = 0.2
SECONDS_OF_A_ROW = 4.0
SEED = 0
Makers = dict[str, Callable[[], Passes]]


def measure(work: Work) -> None:
    """Add a row for each computation, as long as there is time, and the times of launches."""
    if work.is_tiny:
        os.environ["TRITON_INTERPRET"] = "1"
    dtype = torch.bfloat16
    reason = refuse_triton(work.device, dtype)
    # Launches come first: they take the least time.
    if reason:
        work.leave_out("launches", "all", reason)
    else:
        launches.measure(work)
    for name, makers, num_bytes in list_rows(work.device, dtype):
        if not work.has_time("kernels", name, SECONDS_OF_A_ROW):
            continue
        with work.spared("kernels", name):
            add_row(work, name, makers, num_bytes)


def list_rows(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Makers, tuple[int, int]]]:
    """Yield each row's name, its ways, and the bytes that they must move forward and backward."""
    for computation in list_timed(device):
        kind = _Differentiated if computation.has_gradients else _Computed
        given = functools.partial(_draw, computation, dtype, device)
        makers: Makers = {
            "ours": functools.partial(_build, kind, computation.ours, given),
            "plain": functools.partial(_build, kind, computation.twin, given),
        }
        yield computation.name, makers, computation.num_bytes
    size = 100_000_000 if device == "cuda" else 1000
    adam: Makers = {
        "ours": lambda: _Act(_make_step(OnePassAdamW, size, device)),
        "plain": lambda: _Act(_make_step(torch.optim.AdamW, size, device)),
    }
    # Parameter, gradient and two averages are read, and all but the gradient written.
    yield f"AdamW, {size:,}", adam, (7 * 4 * size, 0)
    shape = (100_000, 1024) if device == "cuda" else (12, 16)
    matrices = functools.partial(torch.randn, *shape, device=device, dtype=dtype)
    for name, ours, plain, passes in (
        ("digests", triton_fused.KernelDigester, naive.NaiveDigester, 1),
        ("packs", triton_fused.KernelPacker, naive.NaivePacker, 2),
    ):
        make = _make_digest if name == "digests" else _make_pack
        slices: Makers = {
            "ours": lambda make=make, kind=ours: _Act(make(kind, matrices())),  # type: ignore[misc]
            "plain": lambda make=make, kind=plain: _Act(make(kind, matrices())),  # type: ignore[misc]
        }
        moved = sum(part.values_RC.numel() for part in list_parts(torch.empty(shape, device="meta")))
        yield f"{name} of slices, {shape[0]:,} x {shape[1]:,}", slices, (passes * 2 * moved, 0)


def add_row(work: Work, name: str, makers: Makers, num_bytes: tuple[int, int]) -> None:
    """Add the row of what the makers compute."""
    makers = {**makers, "copy": lambda: _Copy(num_bytes, work.device)}
    times = gpu_times.take_turns(makers, work.device, SECONDS_OF_A_WAY)
    milliseconds = {way: value.both for way, value in times.items()}
    figures = {way: value for way, value in milliseconds.items() if way != "copy"}
    ours, plain, copy = (milliseconds.get(way) for way in ("ours", "plain", "copy"))
    if copy:
        figures["copy_gbps"] = sum(num_bytes) / copy / 1e6
    if ours:
        figures["gbps"] = sum(num_bytes) / ours / 1e6
    if ours and plain:
        figures["speedup"] = plain / ours
    if ours and copy:
        figures["over_copy"] = ours / copy
    work.add("kernels", name, ", ".join(f"{way} {value}" for way, value in times.items()), **figures)


class _Differentiated:
    """An operation and its gradients, on operands of its own."""

    def __init__(self, operation: Operation, given: Sequence[torch.Tensor]):
        self._operation = operation
        self._given = [one.requires_grad_(one.is_floating_point()) for one in given]
        self.forward()
        self._grads = list(map(weigh, self._results))

    def forward(self) -> None:
        self._results = run(self._operation, self._given)

    def backward(self) -> None:
        self._found = torch.autograd.grad(self._results, self._given, self._grads)


class _Act:
    """An act without gradients."""

    def __init__(self, act: Callable[[], object]):
        self._act = act

    def forward(self) -> None:
        self._act()

    def backward(self) -> None:
        """Do nothing."""


class _Computed(_Act):
    """An operation without gradients, on operands of its own."""

    def __init__(self, operation: Operation, given: Sequence[torch.Tensor]):
        super().__init__(lambda: run(operation, given))


class _Copy:
    """A copy in each pass that reads and writes this number of bytes together."""

    def __init__(self, num_bytes: tuple[int, int], device: str):
        self._pairs = [
            [torch.zeros(count // 2, dtype=torch.uint8, device=device) for _ in range(2)] for count in num_bytes
        ]

    def forward(self) -> None:
        self._pairs[0][0].copy_(self._pairs[0][1])

    def backward(self) -> None:
        self._pairs[1][0].copy_(self._pairs[1][1])


def _draw(computation: Computation, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    return computation.draw_operands(dtype, torch.device(device), SEED)


def _build(
    kind: Callable[[Operation, Sequence[torch.Tensor]], Passes],
    operation: Operation,
    draw: Callable[[], Sequence[torch.Tensor]],
) -> Passes:
    return kind(operation, draw())


def _make_step(kind: type[torch.optim.Optimizer], size: int, device: str) -> Callable[[], object]:
    parameter_N = torch.nn.Parameter(torch.randn(size, device=device))
    parameter_N.grad = torch.randn(size, device=device)
    optimizer = kind([parameter_N], **SETTINGS)
    return lambda: optimizer.step()


def _make_digest(
    kind: type[triton_fused.KernelDigester] | type[naive.NaiveDigester], matrix_RC: torch.Tensor
) -> Callable[[], object]:
    parts = list_parts(matrix_RC)
    digester = kind(parts, matrix_RC.dtype, len(parts))
    return lambda: digester.digest()


def _make_pack(
    kind: type[triton_fused.KernelPacker] | type[naive.NaivePacker], matrix_RC: torch.Tensor
) -> Callable[[], object]:
    placed, end = [], 0
    for part in list_parts(matrix_RC):
        placed.append(Placed(part.values_RC, end))
        end += part.values_RC.numel() * matrix_RC.element_size()
    packer, buffer = kind([placed], matrix_RC.dtype), torch.zeros(end, dtype=torch.uint8, device=matrix_RC.device)
    return lambda: packer.pack(0, buffer)
