"""Time shared-prompt attention on a GPU, against the same sequences whole, each with its own prompt.

Forward and backward, in bf16. The time of whole sequences is the best of torch: cuDNN's attention and flash attention
on a batch, padded at its end, and flash attention on sequences of varying length. All of a row take turns, each after
memory that is larger than all caches was written; times are medians. The floor is the products' arithmetic, backward
2.5 times as much as forward, at the speed that the chip is known to compute.
"""

import dataclasses
import functools
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_rl.ops.backends import Conditions
from megatron_rl.ops.shared_prompt import BACKENDS
from megatron_rl.ops.shared_prompt.backends import gather
from megatron_rl.ops.shared_prompt.layout import Layout, find_strands
from megatron_rl.ops.shared_prompt.measured import GroupShape, Measured

# Matrix products in bf16 on an H200.
FLOPS_PER_MS = 790e9
BACKWARD = 2.5
FLUSHED_BYTES = 1 << 30
# Seconds that a way may take of a row, and the fewest and most of its rounds.
SECONDS, FEWEST, MOST = 1.5, 5, 30

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A group, and the heads that attend."""

    name: str
    prompt: int
    responses: tuple[int, ...]
    num_heads: int = 32
    num_groups: int = 8
    head_dim: int = 128

    @property
    def layout(self) -> Layout:
        return Layout.of_groups([(self.prompt, self.responses)])

    @property
    def sequences(self) -> list[int]:
        """The lengths of prompt and response together."""
        return [self.prompt + response for response in self.responses]

    def flops(self, is_shared: bool) -> float:
        """Return the operations of the forward pass: two products for each pair of tokens that attend."""
        if not is_shared:
            return self._flops_of(length * (length + 1) // 2 for length in self.sequences)
        return self._flops_of(
            strand.rows.length * (2 * strand.num_keys - strand.rows.length + 1) // 2
            for strand in find_strands(self.layout)
        )

    def _flops_of(self, pairs: Iterator[int]) -> float:
        return 4.0 * self.head_dim * self.num_heads * sum(pairs)


SHAPES = (
    Shape("4096/1024/16", 4096, (1024,) * 16),
    Shape("512/1024/16", 512, (1024,) * 16),
    Shape("2048/256/8", 2048, (256,) * 8),
    Shape("1024/4096/4", 1024, (4096,) * 4),
    Shape("512/64/8", 512, (64,) * 8),
    Shape("1000/up to 2000/12", 1000, (1873, 214, 655, 1999, 37, 1210, 942, 101, 1506, 388, 760, 1333)),
)
SHAPES_ON_CPU = (
    Shape("32/16/2", 32, (16,) * 2, num_heads=4, num_groups=2, head_dim=32),
    Shape("20/up to 9/3", 20, (4, 9, 1), num_heads=4, num_groups=2, head_dim=32),
)


@dataclasses.dataclass(frozen=True)
class Times:
    """Milliseconds."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward

    def __str__(self) -> str:
        return f"{self.forward:.2f} + {self.backward:.2f}"


@dataclasses.dataclass(frozen=True)
class Row:
    """The times of a shape: whole sequences, and backends of shared prompts."""

    shape: Shape
    whole: Mapping[str, Times]
    shared: Mapping[str, Times]

    @property
    def floor(self) -> Times:
        forward = self.shape.flops(is_shared=True) / FLOPS_PER_MS
        return Times(forward, BACKWARD * forward)

    def describe_for(self, chip: str, blocks: str | None = None) -> Measured:
        """Return the times of the backends as `auto` reads them, and the fastest blocks of `triton`."""
        shape, responses = self.shape, self.shape.responses
        heads = shape.num_heads, shape.num_groups, shape.head_dim
        group = GroupShape(shape.prompt, round(sum(responses) / len(responses)), len(responses), *heads)
        return Measured(chip, group, {name: times.both for name, times in self.shared.items()}, blocks)

    def tflops(self, name: str) -> str:
        """Return the speed of forward and of backward, counting the operations that must be computed."""
        is_shared = name in self.shared
        times, forward = (self.shared if is_shared else self.whole)[name], self.shape.flops(is_shared)
        return f"{forward / times.forward / 1e9:.0f}, {BACKWARD * forward / times.backward / 1e9:.0f}"


class Passes(Protocol):
    """A way of computing something, in two passes."""

    def forward(self) -> None: ...

    def backward(self) -> None: ...


class Way:
    """One way of computing attention, on tensors of its own."""

    def __init__(self, attention: Attention, shapes: Sequence[tuple[int, ...]], device: str) -> None:
        self.attention = attention
        self._inputs = [torch.randn(shape, dtype=torch.bfloat16, device=device).requires_grad_() for shape in shapes]
        self._grad_out = torch.randn(shapes[0], dtype=torch.bfloat16, device=device)

    def forward(self) -> None:
        self._out = self.attention(*self._inputs)

    def backward(self) -> None:
        self._gradients = torch.autograd.grad(self._out, self._inputs, self._grad_out)

    def is_finite(self) -> bool:
        """Check that every result of one run is finite."""
        self.forward()
        self.backward()
        return all(bool(tensor.isfinite().all()) for tensor in (self._out, *self._gradients))


def shapes(device: str) -> tuple[Shape, ...]:
    """Return the shapes that are measured there."""
    return SHAPES if device == "cuda" else SHAPES_ON_CPU


def measure(names: list[str], device: str, seconds: float = SECONDS) -> Iterator[Row]:
    """Yield every shape's times by those backends, and print each as soon as it is known.

    Each way may take this many seconds of a shape.
    """
    for shape in shapes(device):
        print(f"\n{shape.name}, ms forward + backward (TFLOP/s)")
        times = take_turns({**_whole(shape, device), **shared(shape, names, device)}, device, seconds)
        row = Row(
            shape,
            {name: value for name, value in times.items() if name not in BACKENDS},
            {name: value for name, value in times.items() if name in BACKENDS},
        )
        print(f"{'floor':<16}{row.floor!s:>18}")
        for name, value in times.items():
            print(f"{name:<16}{value!s:>18}   ({row.tflops(name)})", flush=True)
        yield row


def shared(shape: Shape, names: list[str], device: str) -> dict[str, Callable[[], Way]]:
    """Return the backends among those that can run, with inputs."""
    layout, scale = shape.layout, shape.head_dim**-0.5
    sizes = [(layout.num_tokens, heads, shape.head_dim) for heads in _heads(shape)]
    ways: dict[str, Callable[[], Way]] = {}
    for name in names:
        if BACKENDS[name].refusal(Conditions(device, torch.bfloat16)) is None:
            attend = functools.partial(_attend, BACKENDS[name].attention, layout, scale)
            ways[name] = functools.partial(Way, attend, sizes, device)
    return ways


def print_tables(rows: list[Row]) -> None:
    """Print tables for the documentation."""
    backends = [name for name in BACKENDS if any(name in row.shared for row in rows)]
    print("\nMilliseconds, forward + backward.\n")
    _print_markdown(
        ["P/R/K", "floor", "whole sequences", *backends],
        [
            [
                row.shape.name,
                str(row.floor),
                " ".join((str(row.whole[best]), best)) if (best := fastest(row.whole)) else "none ran",
                *(str(row.shared.get(name, "")) for name in backends),
            ]
            for row in rows
        ],
    )
    print("\nThe fastest backend, which `auto` would take.\n")
    _print_markdown(
        ["P/R/K", "backend", "whole sequences / shared prompt", "time / floor", "TFLOP/s forward, backward"],
        [
            [
                row.shape.name,
                best,
                f"{row.whole[whole].both / row.shared[best].both:.2f}" if (whole := fastest(row.whole)) else "",
                f"{row.shared[best].both / row.floor.both:.2f}",
                row.tflops(best),
            ]
            for row in rows
            if (best := fastest(row.shared))
        ],
    )


def figures(rows: list[Row]) -> dict[str, float]:
    """Return each shape's speed-up of the fastest backend over whole sequences, and its distance from the floor."""
    found = {}
    for row in rows:
        whole, shared = fastest(row.whole), fastest(row.shared)
        name = row.shape.name.replace("/", "_").replace(" ", "_")
        if shared:
            found[f"of_floor_{name}"] = row.shared[shared].both / row.floor.both
        if shared and whole:
            found[f"speedup_{name}"] = row.whole[whole].both / row.shared[shared].both
    return found


def fastest(times: Mapping[str, Times]) -> str | None:
    """Return the fastest; None if none could run."""
    return min(times, key=lambda name: times[name].both, default=None)


def _print_markdown(header: list[str], rows: list[list[str]]) -> None:
    for cells in (header, ["---"] * len(header), *rows):
        print(f"| {' | '.join(cells)} |")


def _attend(
    attention: Callable[..., torch.Tensor], layout: Layout, scale: float, *inputs: torch.Tensor
) -> torch.Tensor:
    return attention(*inputs, layout, scale, None)


def _whole(shape: Shape, device: str) -> dict[str, Callable[[], Way]]:
    longest, num_sequences = max(shape.sequences), len(shape.sequences)
    batch = [(num_sequences, heads, longest, shape.head_dim) for heads in _heads(shape)]
    repeated = [batch[0]] * 3
    if device == "cpu":
        return {"batch": lambda: Way(_batched(SDPBackend.MATH), batch, device)}
    flat = [(sum(shape.sequences), heads, shape.head_dim) for heads in _heads(shape)]
    return {
        "cuDNN": lambda: Way(_batched(SDPBackend.CUDNN_ATTENTION), batch, device),
        # As if keys had the same number of heads, in case that is what it is fast for.
        "cuDNN, no groups": lambda: Way(_batched(SDPBackend.CUDNN_ATTENTION), repeated, device),
        "flash": lambda: Way(_batched(SDPBackend.FLASH_ATTENTION), batch, device),
        "varlen": lambda: Way(_varying(shape.sequences, device), flat, device),
    }


def _heads(shape: Shape) -> tuple[int, int, int]:
    return shape.num_heads, shape.num_groups, shape.num_groups


def _batched(backend: SDPBackend) -> Attention:
    def attention(q_BHTD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            is_grouped = q_BHTD.shape[1] != k_BGTD.shape[1]
            return F.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTD, is_causal=True, enable_gqa=is_grouped)

    return attention


def _varying(lengths: list[int], device: str) -> Attention:
    from torch.nn.attention.varlen import varlen_attn

    offsets = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)

    longest = max(lengths)

    def attention(q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
        groups = gather.declare_grouping(varlen_attn, q_THD, k_TGD)
        out = varlen_attn(q_THD, k_TGD, v_TGD, offsets, offsets, longest, longest, window_size=(-1, 0), **groups)
        assert isinstance(out, torch.Tensor)
        return out

    return attention


def take_turns(makers: Mapping[str, Callable[[], Passes]], device: str, seconds: float) -> dict[str, Times]:
    """Return the medians of those that could run; each may take this many seconds."""
    ways: dict[str, Passes] = {}
    for name, make in makers.items():
        try:
            ways[name] = make()
            # The first round compiles or prepares what the others find ready.
            _round(ways[name], device, None)
        except Exception as error:
            ways.pop(name, None)
            traceback.print_exc()
            print(f"{name} cannot run: {type(error).__name__}: {' '.join(str(error).split())[:200]}", flush=True)
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device) if device == "cuda" else None
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    end = time.perf_counter() + seconds * len(ways)
    for number in range(MOST if device == "cuda" else FEWEST):
        if number >= FEWEST and time.perf_counter() > end:
            break
        for name, way in ways.items():
            rounds[name].append(_round(way, device, flushed))
    return {
        name: Times(*(statistics.median(times) for times in zip(*values, strict=True)))
        for name, values in rounds.items()
    }


def _round(way: Passes, device: str, flushed: torch.Tensor | None) -> tuple[float, float]:
    """Return milliseconds of forward and of backward."""
    if device == "cpu":
        moments = [time.perf_counter()]
        for step in (way.forward, way.backward):
            step()
            moments.append(time.perf_counter())
        return (moments[1] - moments[0]) * 1e3, (moments[2] - moments[1]) * 1e3
    if flushed is not None:
        # Nothing is left in caches, and meanwhile the host gets ahead.
        flushed.zero_()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    events[0].record()
    way.forward()
    events[1].record()
    way.backward()
    events[2].record()
    events[2].synchronize()
    return events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2])
