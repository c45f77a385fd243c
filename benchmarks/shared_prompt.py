"""Time attention over a shared prompt on one core, and a whole training step with it, against duplicated prompts.

Attention runs forward and backward, with 8 heads of 64 in fp32. A group has K responses of R tokens after one prompt of
P; it is compared with the K whole sequences in torch's own attention, one by one and as a batch, whichever is faster.
A linear layer's convolution and gated delta rule are compared with themselves over the whole sequences.
A row has heads as in multi-latent attention, of 192 and values of 128. Its bound is the ratio of the pairs of tokens.
The step is that of a Qwen3 of 10 M parameters with one group of 512/64/8, from slot to update, against the faster of
--no-shared-prompt and Megatron's own model with a plain batch. All of a row take turns; each ratio is the median over
rounds.
"""

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks import report, shared_prompt_step
from megatron_rl.ops.backends import Conditions
from megatron_rl.ops.gated_delta import gated_delta_rule
from megatron_rl.ops.gated_delta.convolution import causal_convolution
from megatron_rl.ops.shared_prompt import BACKENDS, choose_backend
from megatron_rl.ops.shared_prompt.layout import Layout
from megatron_rl.trainer.data.packing import pack_groups, separate_responses
from tests.ranks import run_ranks

NUM_HEADS, HEAD_DIM = 8, 64
LATENT_DIMS = (192, 128)
GRID = [(p, r, k) for p in (64, 256, 1024) for r in (64, 512) for k in (1, 4, 16)]
RAGGED = [(64, 512, 4), (256, 512, 16), (1024, 512, 4)]
NAMED = [(512, 64, 8), (2048, 64, 8)]
STEP = (512, 64, 8)
# Seconds that a row may take, and the fewest and most of its rounds.
SECONDS, FEWEST, MOST = 2.0, 3, 60


@dataclasses.dataclass(frozen=True)
class Group:
    """A prompt's length and its responses' lengths."""

    prompt: int
    responses: tuple[int, ...]

    @classmethod
    def even(cls, prompt: int, response: int, num_responses: int) -> "Group":
        return cls(prompt, (response,) * num_responses)

    @classmethod
    def ragged(cls, prompt: int, longest: int, num_responses: int) -> "Group":
        """Draw any lengths up to the longest."""
        draw = np.random.default_rng(prompt + num_responses)
        return cls(prompt, tuple(draw.integers(1, longest + 1, num_responses).tolist()))

    @property
    def sequences(self) -> list[int]:
        """The lengths of prompt and response together."""
        return [self.prompt + response for response in self.responses]

    def num_pairs_saved(self) -> float:
        """Return how many times as many pairs of tokens the whole sequences have."""
        own = [length * (length + 1) / 2 for length in (self.prompt, *self.responses)]
        whole = sum(length * (length + 1) / 2 for length in self.sequences)
        return whole / (sum(own) + self.prompt * sum(self.responses))

    def saving(self) -> float:
        """Return the formula's saving: tokens that are not computed, over those of the duplicated sequences."""
        return 1 - (self.prompt + sum(self.responses)) / sum(self.sequences)

    def measured_saving(self) -> float:
        """Return the same, measured on packs."""
        groups = [([0] * self.prompt, [[0] * length for length in self.responses])]
        return 1 - pack_groups(groups).num_tokens / pack_groups(separate_responses(groups)).num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to check that it runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shapes, step_shape, rounds = (GRID, STEP, arguments.step_rounds)
    if arguments.tiny:
        shapes, step_shape, rounds = GRID[:1], (16, 8, 2), 1
    report.table("the time of a layout", {"64 groups of 16, with its calls": layout_times()}, "ms")
    shrink = 16 if arguments.tiny else 1
    named = {
        f"{prompt}/{response}/{count}": Group.even(prompt // shrink, response // shrink, count)
        for prompt, response, count in NAMED
    }
    grid = {"/".join(map(str, shape)): Group.even(*shape) for shape in shapes}
    if not arguments.tiny:
        grid |= {"/".join(map(str, shape)) + " ragged": Group.ragged(*shape) for shape in RAGGED}
    speedups = {name: compare(group) for name, group in {**named, **grid}.items()}
    speedups["512/64/8 MLA"] = compare(named["512/64/8"], LATENT_DIMS)
    report.table("attention: duplicated / shared, P/R/K", speedups, "")
    linear = {name: compare_linear(group) for name, group in named.items()}
    report.table("linear layers: duplicated / shared, P/R/K", linear, "")
    for window in (None, 128):
        title = f"every backend, 512/64/8, {'no window' if window is None else f'a window of {window}'}"
        report.table(title, backend_times(named["512/64/8"], window), "s")
    step = run_ranks(shared_prompt_step.times, 1, *step_shape, rounds)[0]
    report.table("training step", step, "s")
    step_speedups = ratios(step, "shared prompt")
    report.table("ratio", {"duplicated / shared prompt": step_speedups}, "")
    medians = {name: statistics.median(values) for name, values in speedups.items()}
    groups = [*named.values(), *grid.values()]
    report.finish(
        {
            "speedup_512_64_8": medians["512/64/8"],
            "speedup_2048_64_8": medians["2048/64/8"],
            "linear_speedup_512_64_8": statistics.median(linear["512/64/8"]),
            "speedup_mla_512_64_8": medians["512/64/8 MLA"],
            "bound_mla_512_64_8": named["512/64/8"].num_pairs_saved(),
            "worst_of_grid": min(medians[name] for name in grid),
            "step_speedup_512_64_8": statistics.median(step_speedups),
            "token_saving_error": max(abs(group.measured_saving() - group.saving()) for group in groups),
        }
    )


def layout_times() -> list[float]:
    """Time a large micro-batch's layout, with everything that attention looks up of it; in milliseconds."""
    groups = [Group.ragged(512 + number, 256, 16) for number in range(64)]
    prepare = BACKENDS.find(choose_backend("auto", Conditions("cpu", torch.float32)).name).prepare
    times = []
    for _ in range(20):
        start = time.perf_counter()
        layout = Layout.of_groups([(group.prompt, group.responses) for group in groups])
        prepare(layout, torch.device("cpu"))
        times.append((time.perf_counter() - start) * 1e3)
    return times


def backend_times(group: Group, window: int | None) -> dict[str, list[float]]:
    """Time every backend that can run: `auto` takes them in this order."""
    layout = Layout.of_groups([(group.prompt, group.responses)])
    conditions = Conditions("cpu", torch.float32, window)
    ways = {
        name: Way(
            layout.num_tokens,
            functools.partial(_attend, one.attention, layout, window),
        ).run
        for name, one in BACKENDS.items()
        if one.refusal(conditions) is None
    }
    return taking_turns(ways)


def compare(group: Group, dims: tuple[int, int] = (HEAD_DIM, HEAD_DIM)) -> list[float]:
    """Return the speed-ups of the shared prompt, round by round; `dims` are the widths of keys and of values."""
    layout = Layout.of_groups([(group.prompt, group.responses)])
    attention = BACKENDS.find(choose_backend("auto", Conditions("cpu", torch.float32)).name).attention
    ways = {
        "shared": Way(layout.num_tokens, lambda q, k, v: attention(q, k, v, layout, dims[0] ** -0.5, None), dims),
        "looped": Way(sum(group.sequences), lambda q, k, v: one_by_one(q, k, v, group.sequences), dims),
        "batched": Way(
            len(group.sequences) * max(group.sequences),
            lambda q, k, v: as_a_batch(q, k, v, len(group.sequences)),
            dims,
        ),
    }
    return ratios(taking_turns({name: way.run for name, way in ways.items()}), "shared")


def compare_linear(group: Group) -> list[float]:
    """Return the speed-ups of the shared prompt in a linear layer, from its convolution to what its heads read."""
    layouts = {
        "shared": Layout.of_groups([(group.prompt, group.responses)]),
        "whole": Layout.of_groups([(length, ()) for length in group.sequences]),
    }
    return ratios(taking_turns({name: LinearWay(layout).run for name, layout in layouts.items()}), "shared")


def _attend(
    attention: Callable[..., torch.Tensor], layout: Layout, window: int | None, *inputs: torch.Tensor
) -> torch.Tensor:
    return attention(*inputs, layout, HEAD_DIM**-0.5, window)


class Way:
    """One way of computing it, on tensors of its own."""

    def __init__(
        self,
        num_tokens: int,
        attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        dims: tuple[int, int] = (HEAD_DIM, HEAD_DIM),
    ):
        self._attention = attention
        shapes = [(num_tokens, NUM_HEADS, width) for width in (dims[0], *dims)]
        self._inputs = [torch.randn(shape).requires_grad_() for shape in shapes]
        self._grad_out_THD = torch.randn(num_tokens, NUM_HEADS, dims[1])

    def run(self) -> None:
        for tensor in self._inputs:
            tensor.grad = None
        self._attention(*self._inputs).backward(self._grad_out_THD)


class LinearWay:
    """The convolution and the gated delta rule over a layout, with two value heads for each key head."""

    def __init__(self, layout: Layout):
        self._layout = layout
        self._rows = torch.randn(layout.num_tokens, 2 * NUM_HEADS * HEAD_DIM).requires_grad_()
        self._weight = torch.randn(2 * NUM_HEADS * HEAD_DIM, 4).requires_grad_()
        self._log_decays = (-torch.rand(layout.num_tokens, NUM_HEADS)).requires_grad_()
        self._betas = torch.rand(layout.num_tokens, NUM_HEADS).requires_grad_()
        self._grad_out_THV = torch.randn(layout.num_tokens, NUM_HEADS, HEAD_DIM)

    def run(self) -> None:
        for tensor in (self._rows, self._weight, self._log_decays, self._betas):
            tensor.grad = None
        mixed_THD = causal_convolution(self._rows, self._weight, self._layout).unflatten(1, (-1, HEAD_DIM))
        q_TGD, k_TGD, v_THV = mixed_THD.split((NUM_HEADS // 2, NUM_HEADS // 2, NUM_HEADS), dim=1)
        out_THV = gated_delta_rule(q_TGD, k_TGD, v_THV, self._log_decays, self._betas, self._layout)
        out_THV.backward(self._grad_out_THV)


def one_by_one(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Attend over each sequence in a call."""
    parts = zip(*(tensor.split(lengths) for tensor in (q_THD, k_THD, v_THD)), strict=True)
    return torch.cat([as_a_batch(q_LHD, k_LHD, v_LHD, 1) for q_LHD, k_LHD, v_LHD in parts])


def as_a_batch(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Attend over all in one call; shorter ones are padded at their end, which no other row sees."""
    width = v_THD.shape[-1]
    # torch's fast operator has one width for all heads.
    v_THD = F.pad(v_THD, (0, q_THD.shape[-1] - width))
    q, k, v = (tensor.unflatten(0, (num_sequences, -1)).transpose(1, 2) for tensor in (q_THD, k_THD, v_THD))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)[..., :width]


def taking_turns(ways: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Return seconds of each, in as many rounds as the time allows."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    num_rounds = MOST
    while len(next(iter(times.values()))) < num_rounds + 1:
        for name, run in ways.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
        num_rounds = max(FEWEST, min(MOST, int(SECONDS / sum(values[-1] for values in times.values()))))
    # The first round prepares what the others find ready.
    return {name: values[1:] for name, values in times.items()}


def ratios(times: Mapping[str, Sequence[float]], shared: str) -> list[float]:
    """Return the faster of the others over the shared prompt, round by round."""
    others = [values for name, values in times.items() if name != shared]
    best = min(others, key=statistics.median)
    return [a / b for a, b in zip(best, times[shared], strict=True)]


if __name__ == "__main__":
    # Under its importable name, where the ranks find the function they run.
    from benchmarks.shared_prompt import main as importable_main

    importable_main()
