"""The definitions of the element-wise work of a layer, in torch's operations.

Letters: N rows, F the width of a gate, E hidden size.
"""

import torch

from megatron_rl.ops.backends import refuse_nothing

refusal = refuse_nothing


def swiglu(gate_up_N2F: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up; a row has its gate first."""
    gate_NF, up_NF = gate_up_N2F.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate_NF) * up_NF


def weighted_swiglu(gate_up_N2F: torch.Tensor, weights_N: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up times the weight of each row, in the dtype of the rows."""
    return (swiglu(gate_up_N2F) * weights_N[..., None]).to(gate_up_N2F.dtype)


def add_and_normalize(
    one_NE: torch.Tensor, other_NE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one + other and the RMSNorm of this sum."""
    sum_NE = one_NE + other_NE
    return sum_NE, torch.nn.functional.rms_norm(sum_NE, (sum_NE.shape[-1],), weight_E, eps)
