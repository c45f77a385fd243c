"""The gated delta rule and its convolution over forests of segments: backends against the recurrence in float64."""

import dataclasses
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings

from megatron_rl.ops.gated_delta import gated_delta_rule
from megatron_rl.ops.gated_delta.convolution import causal_convolution
from megatron_rl.ops.shared_prompt.layout import ROOT, Layout
from tests.kernels.drawn_layouts import layouts
from tests.kernels.shared_prompt_cases import BRANCHED, RAGGED
from tests.truth import error_over_bound

FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
# Groups with prompts and responses around the length of a chunk, and of several chunks; and a prompt alone.
GROUPS = Layout.of_groups([(64, (1, 65)), (1, ()), (130, (64, 0, 3, 200)), (63, (2,)), (0, (70,))])
NAMES = ("out", "queries", "keys", "values", "log-decays", "betas")


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs, rounded to a precision, and the gradient of the output."""

    layout: Layout
    inputs: tuple[torch.Tensor, ...]
    grad_out: torch.Tensor

    @classmethod
    def draw(cls, layout: Layout, heads: tuple[int, int] = (1, 2), dims: tuple[int, int] = (8, 6)) -> "Case":
        """Draw inputs of key heads and value heads, with decays from none to almost all of the state."""
        generator = torch.Generator().manual_seed(layout.num_tokens)
        (groups, num_heads), (dim, width), rows = heads, dims, layout.num_tokens

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(rows, *shape, generator=generator, dtype=FP64).float()

        log_decays = -F.softplus(3 * normal(num_heads) - 3)
        tensors = (normal(groups, dim), normal(groups, dim), normal(num_heads, width), log_decays)
        return cls(layout, (*tensors, normal(num_heads).sigmoid()), normal(num_heads, width))

    def run(self, name: str, dtype: torch.dtype) -> list[torch.Tensor]:
        """Compute the output and all gradients."""
        wide = torch.promote_types(dtype, FP32)
        inputs = [one.to(wide if place >= 3 else dtype) for place, one in enumerate(self.inputs)]
        return compute(lambda *given: gated_delta_rule(*given, self.layout, name), inputs, self.grad_out)


def compute(function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], grad: torch.Tensor) -> list[Any]:
    given = [one.detach().clone().requires_grad_() for one in inputs]
    out = function(*given)
    gradients = torch.autograd.grad(out, given, grad.to(out.dtype), allow_unused=True)
    found = [torch.zeros_like(one) if grad is None else grad for one, grad in zip(given, gradients, strict=True)]
    return [out.detach(), *found]


def errors(found: list[torch.Tensor], theirs: list[torch.Tensor], truth: list[torch.Tensor]) -> dict[str, float]:
    tensors = zip(NAMES, found, theirs, truth, strict=True)
    return {name: error_over_bound(*three) for name, *three in tensors if three[0].numel()}


@pytest.mark.parametrize("layout", [GROUPS, RAGGED, BRANCHED], ids=["groups", "ragged", "branched"])
def test_chunks_compute_the_recurrence_over_a_forest_and_all_of_its_gradients(layout: Layout) -> None:
    case = Case.draw(layout)
    truth = case.run("naive", FP64)
    exact = case.run("torch", FP64)
    for name, one, other in zip(NAMES, exact, truth, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
    found = errors(case.run("torch", FP32), case.run("naive", FP32), truth)
    print(found)
    assert max(found.values()) <= 1


@given(layout=layouts())
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_forest_of_short_segments_is_computed(layout: Layout) -> None:
    case = Case.draw(layout, heads=(2, 2), dims=(4, 4))
    for one, other in zip(case.run("torch", FP64), case.run("naive", FP64), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def split_sequences(layout: Layout, rows: torch.Tensor) -> list[torch.Tensor]:
    """Return each leaf's whole sequence, by the definition of a layout."""
    inner = set(layout.parents)
    found = []
    for segment in range(layout.num_segments):
        if segment not in inner:
            members = layout.ancestors[segment][layout.segment_of_token]
            found.append(rows[torch.from_numpy(members)])
    return found


def test_a_shared_prompt_gives_what_whole_sequences_give() -> None:
    case = Case.draw(GROUPS)
    shared = case.run("torch", FP64)[0]
    sequences = [split_sequences(GROUPS, one) for one in case.inputs]
    whole = Layout(tuple(map(len, sequences[0])), (ROOT,) * len(sequences[0]))
    alone = gated_delta_rule(*(torch.cat(parts).double() for parts in sequences), whole, "torch")
    torch.testing.assert_close(torch.cat(split_sequences(GROUPS, shared)), alone, rtol=1e-11, atol=1e-12)


def test_strong_decays_keep_their_precision() -> None:
    # Sums of logarithms from a chunk's start are in the hundreds, and the decays between neighbours are near 1.
    case = Case.draw(Layout((120,), (ROOT,)))
    strong = torch.where(torch.arange(120)[:, None] % 3 == 0, -60.0, -1e-3).expand(-1, 2).contiguous()
    case = dataclasses.replace(case, inputs=(*case.inputs[:3], strong, case.inputs[4]))
    found = errors(case.run("torch", FP32), case.run("naive", FP32), case.run("naive", FP64))
    assert max(found.values()) <= 1


def test_half_precision_is_computed_in_fp32_and_rounded_once() -> None:
    case = Case.draw(RAGGED)
    out, *gradients = case.run("torch", BF16)
    assert [one.dtype for one in (out, *gradients)] == [BF16] * 4 + [FP32] * 2
    found = errors([one.to(BF16) for one in (out, *gradients)], [one.to(BF16) for one in case.run("naive", BF16)],
                   case.run("naive", FP64))  # fmt: skip
    assert max(found.values()) <= 1


def convolve_sequences(x: torch.Tensor, weight: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Convolve each whole sequence by torch's own function."""
    results = []
    for sequence in split_sequences(layout, x):
        padded = F.pad(sequence.T[None], (weight.shape[1] - 1, 0))
        results.append(F.conv1d(padded, weight[:, None], groups=len(weight))[0].T)
    return results


@pytest.mark.parametrize("layout", [GROUPS, BRANCHED, Layout((1, 1, 0, 1, 2, 3), (ROOT, 0, 1, 2, 3, 0))])
@pytest.mark.parametrize("width", [1, 4])
def test_the_convolution_reaches_back_over_segments(layout: Layout, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, columns, generator=generator, dtype=FP64)
                 for rows, columns in ((layout.num_tokens, 5), (5, width)))  # fmt: skip
    inner = set(layout.parents)
    leaves = [one for one in range(layout.num_segments) if one not in inner]
    weights = [torch.randn(int(layout.ancestors[one] @ layout.lengths), 5, generator=generator, dtype=FP64)
               for one in leaves]  # fmt: skip

    def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.cat(convolve_sequences(x, weight, layout))

    def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.cat(split_sequences(layout, causal_convolution(x, weight, layout)))

    # Rows of a prompt get gradients from each of its responses.
    grad = torch.cat(weights)
    for one, other in zip(compute(ours, [x, weight], grad), compute(expected, [x, weight], grad), strict=True):
        torch.testing.assert_close(one, other)


def released(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    scale: float | None = None, initial_state: torch.Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    state_v_first: bool = False, cu_seqlens: torch.Tensor | None = None, cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None, cp_context: Any = None, **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Compute what flash-linear-attention 0.6.0 documents for the arguments of its function, which this has."""
    changed = (use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, *kwargs)
    assert not any(changed)
    assert cu_seqlens is not None
    assert cu_seqlens.dtype == torch.long
    assert (cu_seqlens.diff() > 0).all()
    assert q.shape == k.shape == (1, v.shape[1], v.shape[2], q.shape[3])
    assert q.dtype == k.dtype == v.dtype
    assert g.dtype == beta.dtype == torch.promote_types(v.dtype, FP32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    num_sequences = len(cu_seqlens) - 1
    shape = (num_sequences, v.shape[2], q.shape[3], v.shape[3])
    states = torch.zeros(shape, dtype=g.dtype) if initial_state is None else initial_state
    assert (states.shape, states.dtype) == (shape, g.dtype)
    outs, finals = [], []
    for sequence in range(num_sequences):
        state = states[sequence]
        for row in range(int(cu_seqlens[sequence]), int(cu_seqlens[sequence + 1])):
            key, value = k[0, row].to(g.dtype), v[0, row].to(g.dtype)
            state = state * g[0, row].exp()[:, None, None]
            change = (value - torch.einsum("hdv,hd->hv", state, key)) * beta[0, row][:, None]
            state = state + torch.einsum("hd,hv->hdv", key, change)
            outs.append(torch.einsum("hdv,hd->hv", state, q[0, row].to(g.dtype)) * scale)
        finals.append(state)
    return torch.stack(outs)[None].to(v.dtype), torch.stack(finals) if output_final_state else None


@pytest.fixture
def flash_linear(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Put a stand-in in the package's place, and return the arguments of its calls."""
    calls: list[dict[str, Any]] = []

    def chunk_gated_delta_rule(*args: Any, **kwargs: Any) -> Any:
        calls.append(dict(inspect.signature(released).bind(*args, **kwargs).arguments))
        return released(*args, **kwargs)

    module: Any = types.ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = chunk_gated_delta_rule
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", module)
    return calls


@pytest.mark.parametrize("layout", [GROUPS, BRANCHED], ids=["groups", "branched"])
def test_flash_linear_attention_is_called_once_for_each_level_of_segments(layout: Layout, flash_linear) -> None:
    case = Case.draw(layout, heads=(1, 2), dims=(4, 3))
    for name, one, other in zip(NAMES, case.run("flash-linear", FP64), case.run("naive", FP64), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
    depth = {"groups": 2, "branched": 4}["groups" if layout is GROUPS else "branched"]
    assert len(flash_linear) == depth
    assert [call["initial_state"] is None for call in flash_linear] == [True] + [False] * (depth - 1)
    # No state is asked for that nothing begins with.
    assert [call["output_final_state"] for call in flash_linear] == [True] * (depth - 1) + [False]
