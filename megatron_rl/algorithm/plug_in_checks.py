"""Trials of plug-ins before a run starts, on a small micro-batch, for what the promises of a run need.

- The answer of a loss does not depend on the other responses of its micro-batch, nor on their order: otherwise the
  update would depend on the packing.
- Two calls with the same input give the same bits: otherwise a resumed run would be another one.
- The losses are proportional to the advantages where the deviation of the advantages divides the whole loss.
- The losses are finite, and have a finite gradient by the policy's log-probs.
- A flag that only losses read is read by this one.
- Groups of equal rewards have advantages of zero where other groups are sampled in their place.

Letters: N targets, K responses of a group.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from megatron_rl.algorithm.declaration import RoleLogProbs, ScoredGroup, Targets, Term
from megatron_rl.algorithm.library import LOSS_FIELDS
from megatron_rl.algorithm.plug_ins import (
    ADVANTAGE,
    LOSS,
    ROLE,
    PlugIn,
    check_advantages,
    check_gradient,
    check_losses,
    check_metric,
    find_advantage,
    find_metrics,
    find_roles,
    list_plug_ins,
)
from megatron_rl.algorithm.sequences import Sequences
from megatron_rl.algorithm.settings import AlgorithmConfig
from megatron_rl.code_files import find_line
from megatron_rl.errors import InputError, UsageError

# Lengths of the responses; ratios between 0.6 and 1.6 leave every usual bound on both sides.
_LENGTHS = (3, 1, 6, 2)
_MAX_TOKENS = 8
_SPREAD = 0.5
# Two sums of the same numbers in another order differ by less.
_NEAR = 1e-4


def find_plug_in_problems(
    config: AlgorithmConfig, written: Collection[str], weights: dict[str, float]
) -> Iterator[str]:
    """Yield the problems of the plug-ins that the settings name.

    `written` are the fields of the settings whose flags the user has written; `weights` those of the reward functions.
    """
    try:
        plug_ins = list_plug_ins(config)
        find_metrics(config.metrics or ())
        find_roles(config)
    except UsageError as error:
        yield from error.problems
        return
    for plug_in in plug_ins:
        # Random numbers that a function draws here must not change the run's.
        with torch.random.fork_rng(devices=[]):
            try:
                if plug_in.flag == LOSS:
                    yield from _try_loss(plug_in, config, written)
                elif plug_in.flag == ADVANTAGE:
                    yield from _try_advantage(plug_in, config, weights)
                elif plug_in.flag == ROLE:
                    yield from _try_role(plug_in, config)
                else:
                    yield from _try_metric(plug_in, config)
            except InputError as error:
                yield str(error)
            except Exception as error:
                place = find_line(error, plug_in.source)
                yield (
                    f"{plug_in.label} fails on a trial micro-batch on the CPU: {place}{type(error).__name__}: {error}; "
                    "correct the function"
                )


def draw_targets(
    config: AlgorithmConfig, responses: Sequence[int] = range(len(_LENGTHS)), factor: float = 1.0
) -> Targets:
    """Draw the targets of some responses; the advantages are `factor` times as large as usual."""
    draw = torch.Generator().manual_seed(0)
    count, parts = sum(_LENGTHS), []
    numbers_N = torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS))
    old_N = -0.1 - 2 * torch.rand(count, generator=draw)

    policy_N = (old_N + _SPREAD * (2 * torch.rand(count, generator=draw) - 1)).clamp(max=-0.01)
    engine_N = old_N + 0.01 * torch.randn(count, generator=draw)
    reference_N = old_N + 0.1 * torch.randn(count, generator=draw)
    advantages_N = factor * torch.tensor([1.0, -1.0, -0.5, 0.5])[numbers_N]
    for values_N in (policy_N, old_N, advantages_N, engine_N, reference_N):
        of_responses = values_N.split(_LENGTHS)
        parts.append(torch.cat([of_responses[number] for number in responses]))
    lengths_S = torch.tensor([_LENGTHS[number] for number in responses])
    sequences = Sequences(torch.repeat_interleave(torch.arange(len(lengths_S)), lengths_S), lengths_S, _MAX_TOKENS)
    policy_N, old_N, advantages_N, engine_N, reference_N = parts
    others = {name: reference_N for name, role in find_roles(config).items() if role.is_used(config)}
    return Targets(policy_N.requires_grad_(), old_N, advantages_N, sequences, engine_N, others)


def _try_loss(plug_in: PlugIn, config: AlgorithmConfig, written: Collection[str]) -> Iterator[str]:
    watched, read = _watch(config)
    whole = draw_targets(config)
    surrogate = check_losses(plug_in, plug_in.function(whole, watched), whole)
    gradient_N = check_gradient(plug_in, surrogate, whole)
    for name in sorted(LOSS_FIELDS & set(written) - read):
        yield f"{plug_in.label} does not read settings.{name}: drop the flag that sets it"

    def compute(targets: Targets) -> torch.Tensor:
        answer = check_losses(plug_in, plug_in.function(targets, config), targets)
        return torch.stack([answer.loss_N.detach(), check_gradient(plug_in, answer, targets)])

    first = torch.stack([surrogate.loss_N.detach(), gradient_N])
    yield from _find_dependences(plug_in, config, compute, first)
    is_divided = find_advantage(config.advantage).divided_over is not None
    if is_divided and not _is_near(compute(draw_targets(config, factor=2.0)), 2 * first):
        yield (
            f"{plug_in.label} is not proportional to targets.advantages_N, and --grpo-advantage {config.advantage} "
            "divides the whole loss by their deviation: write another --grpo-advantage"
        )


def _try_metric(plug_in: PlugIn, config: AlgorithmConfig) -> Iterator[str]:
    def compute(targets: Targets) -> torch.Tensor:
        with torch.no_grad():
            return check_metric(plug_in, plug_in.function(targets, config), targets).double()[None]

    yield from _find_dependences(plug_in, config, compute, compute(draw_targets(config)))


def _try_role(plug_in: PlugIn, config: AlgorithmConfig) -> Iterator[str]:
    def compute(targets: Targets) -> torch.Tensor:
        log_probs = RoleLogProbs(targets.policy_N, targets.old_N, targets.others)
        term = plug_in.function(log_probs, targets.sequences, config)
        if not isinstance(term, Term) or (term.advantages_N is None and term.loss_N is None):
            raise InputError(f"{plug_in.label}: compute must return a Term with advantages_N or loss_N")
        parts = [part for part in (term.advantages_N, term.loss_N) if part is not None]
        return torch.stack([check_metric(plug_in, part, targets).detach().double() for part in parts])

    yield from _find_dependences(plug_in, config, compute, compute(draw_targets(config)))


def _try_advantage(plug_in: PlugIn, config: AlgorithmConfig, weights: dict[str, float]) -> Iterator[str]:
    def compute(rewards: Sequence[float]) -> np.ndarray:
        components = {name: np.array(rewards) for name in weights}
        group = ScoredGroup(np.array(rewards), components, weights, baseline=None)
        return check_advantages(plug_in, plug_in.function(group, config), len(rewards))

    rewards = [0.0, 1.0, 1.0, 0.25]
    first = compute(rewards)
    if not np.array_equal(first, compute(rewards)):
        yield _describe_change(plug_in)
    order = [2, 0, 3, 1]
    if not np.allclose(compute([rewards[number] for number in order]), first[order], rtol=_NEAR, atol=_NEAR):
        yield (
            f"{plug_in.label}: the advantage of a response depends on its place in the group, which means nothing: "
            "compute it from the rewards alone"
        )
    if compute([1.0, 1.0, 1.0, 1.0]).any() and config.filter_groups:
        yield (
            f"{plug_in.label} gives groups of equal rewards advantages, and --grpo-filter-groups-with-same-reward "
            "leaves them out, so the gradient would be biased: drop one of them"
        )


def _find_dependences(
    plug_in: PlugIn, config: AlgorithmConfig, compute: Callable[[Targets], torch.Tensor], first: torch.Tensor
) -> Iterator[str]:
    """Yield a problem if the answer changes from call to call, or with the other responses of a micro-batch."""
    if not torch.equal(compute(draw_targets(config)), first):
        yield _describe_change(plug_in)
        return
    columns = list(first.split(_LENGTHS, dim=1))
    numbers = range(len(_LENGTHS))
    for responses in (*((number,) for number in numbers), tuple(reversed(numbers))):
        expected = torch.cat([columns[number] for number in responses], dim=1)
        if not _is_near(compute(draw_targets(config, responses)), expected):
            yield (
                f"{plug_in.label}: the values of a response depend on the other responses of its micro-batch, so they "
                "would depend on how responses are packed: compute them from the response alone, as targets.sequences "
                "does"
            )
            return


def _describe_change(plug_in: PlugIn) -> str:
    return (
        f"{plug_in.label}: two calls with the same input give different values, so a resumed run would be another run: "
        "draw no random numbers, and keep nothing from call to call"
    )


def _is_near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a - b).abs() <= _NEAR * b.abs().max().clamp(min=1e-6)).all())


def _watch(config: AlgorithmConfig) -> tuple[AlgorithmConfig, set[str]]:
    """Return a copy of the settings, and the set that the names of its fields are added to when they are read."""
    read: set[str] = set()

    class Watched(AlgorithmConfig):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    watched = Watched(**values)
    read.clear()
    return watched, read
