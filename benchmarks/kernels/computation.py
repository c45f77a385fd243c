"""One computation by an operation of ours and by its twin, on the same numbers."""

import dataclasses
from collections.abc import Callable, Sequence

import torch

Operation = Callable[..., torch.Tensor | Sequence[torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Computation:
    """One computation. Operands are drawn on the host; those that are not integers are then rounded to a dtype."""

    name: str
    results: tuple[str, ...]
    """The names of the results, and of the gradients of all operands that have one."""
    ours: Operation
    twin: Operation
    """The definition, in any dtype."""
    draw: Callable[[torch.Generator], Sequence[torch.Tensor]]
    has_gradients: bool = True
    is_exact: bool = False
    """True if results have the bits of the twin's in the same dtype."""
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")
    num_bytes: tuple[int, int] = (0, 0)
    """The bytes in bf16, or in its only dtype, that must be moved forward and backward: each tensor once."""

    def draw_operands(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> list[torch.Tensor]:
        """Draw operands, numbers of the dtype."""
        drawn = self.draw(torch.Generator().manual_seed(seed))
        return [tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device) for tensor in drawn]


def run(operation: Operation, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the results."""
    found = operation(*operands)
    return [found] if isinstance(found, torch.Tensor) else list(found)


def differentiate(operation: Operation, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the results, and the gradients of a loss with uneven weights of both signs."""
    given = [operand.detach().requires_grad_(operand.is_floating_point()) for operand in operands]
    results = run(operation, given)
    found = torch.autograd.grad(results, [one for one in given if one.requires_grad], list(map(weigh, results)))
    return [tensor.detach() for tensor in (*results, *found)]


def weigh(result: torch.Tensor) -> torch.Tensor:
    """Return the weights of a result's numbers in the loss, in its dtype."""
    places = torch.arange(result.numel(), dtype=torch.float64, device=result.device)
    return torch.sin(places + 1).reshape(result.shape).to(result.dtype)
