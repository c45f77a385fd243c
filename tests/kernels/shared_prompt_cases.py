"""The cases of the tests of shared-prompt attention, and the dense definition in float64 that they compare with.

Letters: T tokens, H query heads, G key-value heads, D head dimension.
"""

import dataclasses
from collections.abc import Callable

import torch

from megatron_rl.ops.shared_prompt import BACKENDS
from megatron_rl.ops.shared_prompt.layout import ROOT, Layout

NAMES = ("out", "queries", "keys", "values")
# The results of a case with sinks.
NAMES_WITH_SINKS = (*NAMES, "sinks")

RAGGED = Layout.of_groups([(70, [33, 0, 64, 64, 5]), (0, [40, 17]), (31, [1]), (19, [])])
# Turns of a conversation, each with several answers, and one turn that continues after another turn's answers.
BRANCHED = Layout(
    (40, 9, 21, 21, 14, 33, 0, 12, 50, 7, 30),
    (ROOT, 0, 1, 1, 0, 4, 4, 6, ROOT, 2, 8),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs, rounded to a precision, and the gradient of the output."""

    layout: Layout
    q_THD: torch.Tensor
    k_TGD: torch.Tensor
    v_TGD: torch.Tensor
    grad_out_THD: torch.Tensor
    scale: float
    window: int | None = None
    sinks_H: torch.Tensor | None = None

    @classmethod
    def draw(
        cls,
        layout: Layout,
        heads: tuple[int, int],
        head_dim: int,
        dtype: torch.dtype = torch.float64,
        window: int | None = None,
        draw: int = 0,
        value_dim: int | None = None,
        has_sinks: bool = False,
    ) -> "Case":
        """Draw inputs for query heads and key-value heads; each draw has the same numbers at each call.

        Without `value_dim`, values are as wide as keys. Sinks are from -1 to 3, so that each has a share.
        """
        value_dim = value_dim or head_dim
        generator = torch.Generator().manual_seed(layout.num_tokens + draw)
        tensors = [
            torch.randn(layout.num_tokens, num, width, generator=generator, dtype=torch.float64).to(dtype)
            for num, width in ((heads[0], head_dim), (heads[1], head_dim), (heads[1], value_dim), (heads[0], value_dim))
        ]
        sinks_H = torch.linspace(-1, 3, heads[0], dtype=torch.float64).to(dtype) if has_sinks else None
        return cls(layout, *tensors, scale=head_dim**-0.5, window=window, sinks_H=sinks_H)

    def on(self, device: str) -> "Case":
        """Return the same numbers on another device."""
        tensors = {
            field.name: value.to(device)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return dataclasses.replace(self, **tensors)

    def run(self, attention: Callable[..., torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Compute the output and all gradients in a precision."""
        dtype = dtype or self.q_THD.dtype
        given = (self.q_THD, self.k_TGD, self.v_TGD, *([] if self.sinks_H is None else [self.sinks_H]))
        inputs = [tensor.to(dtype).detach().requires_grad_() for tensor in given]
        out_THD = attention(*inputs[:3], self.layout, self.scale, self.window, *inputs[3:])
        assert out_THD.dtype == dtype
        out_THD.backward(self.grad_out_THD.to(dtype))
        gradients = [tensor.grad for tensor in inputs]
        assert all(gradient is not None and gradient.dtype == dtype for gradient in gradients)
        return [out_THD.detach(), *gradients]

    def exact(self) -> list[torch.Tensor]:
        """Compute the same by the definition, in float64."""
        return self.run(BACKENDS["naive"].attention, torch.float64)

    def assert_near(self, attention: Callable[..., torch.Tensor]) -> None:
        """Check that each error is at most twice the definition's in the same precision."""
        exact = self.exact()
        naive = errors(self.run(BACKENDS["naive"].attention), exact)
        for name, error in errors(self.run(attention), exact).items():
            assert error <= 2 * naive[name] + 1e-12, (name, error, naive[name])


def errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> dict[str, float]:
    """Return the largest error of each tensor."""
    return {
        name: (one.double() - other).abs().max().item() if other.numel() else 0.0
        for name, one, other in zip(NAMES_WITH_SINKS[: len(exact)], found, exact, strict=True)
    }


def token_errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the mean square error of each token, over its heads and their numbers, for each tensor."""
    return {name: mean_squares(one.double() - other) for name, one, other in zip(NAMES, found, exact, strict=True)}


def mean_squares(tensor_THD: torch.Tensor) -> torch.Tensor:
    """Return the mean square of each token's numbers."""
    return tensor_THD.square().mean(dim=(1, 2))
