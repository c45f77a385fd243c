"""Adam's update in one pass over parameters, gradients and averages, by torch's fused operation.

torch's own step takes about ten passes unless it is told to fuse, and then it keeps the number of steps on the device,
where checkpoints would wait for it. Here the number stays on the host: state is the same with both.

Letters: N elements.
"""

import collections
import functools
from collections.abc import Iterator
from typing import Any

import torch

from megatron_rl.ops.backends import Example

_NUM_ELEMENTS, _NUM_STEPS = 1000, 3
_RATE, _BETAS, _EPSILON, _DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1


class _OnePass:
    """The step of Adam and of AdamW."""

    @torch.no_grad()
    def step(self: Any, closure: None = None) -> None:
        """Update all parameters that have gradients."""
        assert closure is None, "Megatron has computed the gradients"
        for group in self.param_groups:
            is_decoupled = group.get("decoupled_weight_decay", isinstance(self, torch.optim.AdamW))
            update: Any = torch._fused_adamw_ if is_decoupled else torch._fused_adam_
            # Parameters, gradients, averages, averages of squares, their maxima, steps.
            lists: list[list[torch.Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)
            *tensors, _, steps = lists
            places = collections.defaultdict(list)
            for place, step in enumerate(steps):
                step += 1
                places[step.item()].append(place)
            for number, some in places.items():
                chosen = [[of_kind[place] for place in some] for of_kind in tensors]
                number_on_device = torch.full((), number, dtype=torch.float32, device=chosen[0][0].device)
                update(
                    *chosen, [], [number_on_device] * len(some), lr=group["lr"], beta1=group["betas"][0],
                    beta2=group["betas"][1], weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False,
                    maximize=False,
                )  # fmt: skip


class OnePassAdam(_OnePass, torch.optim.Adam):  # type: ignore[misc]
    """torch's Adam with a step of one pass."""


class OnePassAdamW(_OnePass, torch.optim.AdamW):  # type: ignore[misc]
    """torch's AdamW with a step of one pass."""


_OURS: dict[type, type] = {torch.optim.Adam: OnePassAdam, torch.optim.AdamW: OnePassAdamW}
_PLAIN = ("amsgrad", "maximize", "capturable", "differentiable", "fused")


def use_one_pass(optimizer: Any) -> None:
    """Have an optimizer that is exactly torch's Adam or AdamW, on one device in one dtype, update in one pass."""
    ours = _OURS.get(type(optimizer))
    if ours is None:
        return
    kinds = {(one.device, one.dtype) for group in optimizer.param_groups for one in group["params"]}
    is_plain = not any(group.get(name) for group in optimizer.param_groups for name in _PLAIN)
    if len(kinds) == 1 and is_plain:
        optimizer.__class__ = ours


def list_examples() -> Iterator[Example]:
    """Yield steps of each class; the backend `torch` takes torch's own."""
    generator = torch.Generator().manual_seed(0)
    start_N, *grads = (torch.randn(_NUM_ELEMENTS, generator=generator) for _ in range(1 + _NUM_STEPS))

    def take_steps(
        theirs: type[torch.optim.Optimizer], name: str, device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.nn.Parameter]:
        parameter_N = torch.nn.Parameter(start_N.to(device, dtype, copy=True))
        settings: Any = {"lr": _RATE, "betas": _BETAS, "eps": _EPSILON, "weight_decay": _DECAY}
        optimizer = (theirs if name == "torch" else _OURS[theirs])([parameter_N], **settings)
        for grad_N in grads:
            parameter_N.grad = grad_N.to(device, dtype)
            optimizer.step()
        return (parameter_N,)

    for theirs in _OURS:
        compute = functools.partial(take_steps, theirs)
        # An optimizer's parameters are in fp32, whatever a model computes in.
        yield Example(f"the steps of {theirs.__name__}", ("the parameter",), compute, dtype=torch.float32)
