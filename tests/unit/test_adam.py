"""Adam's update in one pass: its steps are those of the definition, with torch's own state."""

import copy
from typing import Any

import pytest
import torch

from megatron_rl.errors import PlatformError
from megatron_rl.ops import adam, elementwise
from megatron_rl.ops.backends import Conditions
from tests.truth import error_over_bound

FP64, FP32 = torch.float64, torch.float32
RATE, BETAS, EPSILON, DECAY = 0.05, (0.8, 0.9), 1e-4, 0.3
SIZES = (1, 13, 70_001)
KINDS = [(torch.optim.Adam, adam.OnePassAdam), (torch.optim.AdamW, adam.OnePassAdamW)]


def make(kind: Any, dtype: torch.dtype = FP32) -> Any:
    """Make an optimizer of parameters of two groups, one of which has no decay."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in SIZES]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.0, "lr": 2 * RATE}]
    return kind(groups, lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY)


def list_parameters(optimizer: Any) -> list[torch.nn.Parameter]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def step(optimizer: Any, number: int) -> None:
    """Take a step with gradients that follow from its number; the second parameter misses every other step."""
    generator = torch.Generator().manual_seed(number)
    for place, one in enumerate(list_parameters(optimizer)):
        grad = torch.randn(one.shape, generator=generator).to(one.dtype)
        one.grad = None if place == 1 and number % 2 else grad
    optimizer.step()


def define(is_decoupled: bool, num_steps: int) -> list[torch.Tensor]:
    """Take steps by the formulas of Adam, number by number in float64."""
    start = make(torch.optim.Adam, FP64)
    values = [one.detach() for one in list_parameters(start)]
    averages, squares = ([torch.zeros_like(one) for one in values] for _ in range(2))
    counts = [0, 0, 0]
    for number in range(num_steps):
        generator = torch.Generator().manual_seed(number)
        for place, value in enumerate(values):
            grad = torch.randn(value.shape, generator=generator).to(FP64)
            if place == 1 and number % 2:
                continue
            rate, decay = (RATE, DECAY) if place < 2 else (2 * RATE, 0.0)
            counts[place] += 1
            if is_decoupled:
                value *= 1 - rate * decay
            else:
                grad = grad + decay * value
            averages[place] = BETAS[0] * averages[place] + (1 - BETAS[0]) * grad
            squares[place] = BETAS[1] * squares[place] + (1 - BETAS[1]) * grad**2
            mean = averages[place] / (1 - BETAS[0] ** counts[place])
            value -= rate * mean / ((squares[place] / (1 - BETAS[1] ** counts[place])).sqrt() + EPSILON)
    return values


@pytest.mark.parametrize(("theirs", "ours"), KINDS)
def test_steps_are_those_of_the_definition_and_state_is_torchs(theirs: Any, ours: Any) -> None:
    one_pass, own = make(theirs), make(theirs)
    adam.use_one_pass(one_pass)
    assert type(one_pass) is ours
    for number in range(5):
        step(one_pass, number)
        step(own, number)
    truth = define(theirs is torch.optim.AdamW, 5)
    for mine, other, exact in zip(list_parameters(one_pass), list_parameters(own), truth, strict=True):
        assert error_over_bound(mine.detach(), other.detach(), exact) <= 1
    states = one_pass.state_dict(), own.state_dict()
    assert states[0]["param_groups"] == states[1]["param_groups"]
    for mine, other in zip(states[0]["state"].values(), states[1]["state"].values(), strict=True):
        assert mine.keys() == other.keys()
        # Steps stay on the host, where a checkpoint finds them without waiting for the device.
        assert (mine["step"].device.type, mine["step"].item()) == ("cpu", other["step"].item())
        assert all(torch.allclose(mine[name], other[name], rtol=1e-5, atol=1e-7) for name in mine)


def test_a_step_after_a_load_is_the_step_that_follows() -> None:
    one_pass, loaded = make(torch.optim.AdamW), make(torch.optim.AdamW)
    for optimizer in (one_pass, loaded):
        adam.use_one_pass(optimizer)
    step(one_pass, 0)
    step(one_pass, 1)
    loaded.load_state_dict(copy.deepcopy(one_pass.state_dict()))
    for mine, other in zip(list_parameters(loaded), list_parameters(one_pass), strict=True):
        mine.data.copy_(other.data)
    step(one_pass, 2)
    step(loaded, 2)
    assert all(map(torch.equal, list_parameters(loaded), list_parameters(one_pass)))


def test_optimizers_that_one_pass_does_not_cover_keep_torchs_step() -> None:
    class OfARecipe(torch.optim.AdamW):
        pass

    mixed = make(torch.optim.AdamW)
    mixed.param_groups[0]["params"][0].data = mixed.param_groups[0]["params"][0].data.double()
    largest = make(torch.optim.AdamW)
    largest.param_groups[1]["amsgrad"] = True
    for optimizer in (make(OfARecipe), mixed, largest, torch.optim.SGD(list_parameters(make(torch.optim.Adam))), None):
        kind = type(optimizer)
        adam.use_one_pass(optimizer)
        assert type(optimizer) is kind


@pytest.mark.parametrize("spoil", [lambda x: x * 1.01, lambda x: x + torch.nan])
def test_an_operation_that_computes_something_else_is_refused_with_what_to_write(
    spoil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(elementwise.BACKENDS, "triton", elementwise.plain)
    conditions = Conditions("cpu", torch.bfloat16)
    elementwise.BACKENDS.check("triton", conditions)
    for name in ("_fused_adam_", "_fused_adamw_"):
        with monkeypatch.context() as patch:
            right = getattr(torch, name)

            def wrong(parameters: list[torch.Tensor], *given: Any, right: Any = right, **named: Any) -> None:
                right(parameters, *given, **named)
                for one in parameters:
                    one.copy_(spoil(one))

            patch.setattr(torch, name, wrong)
            with pytest.raises(PlatformError, match="does not compute the steps of Adam.* Write torch instead"):
                elementwise.BACKENDS.check("triton", conditions)
