"""The definition of the gated delta rule: token by token, each from the state of its predecessor.

Letters: T tokens, G key heads, H value heads, D dimensions of a query and a key, V of a value.
"""

import torch

from megatron_rl.ops.backends import refuse_nothing
from megatron_rl.ops.shared_prompt.layout import Layout

refusal = refuse_nothing


def prepare(layout: Layout) -> None:
    """Make no tables."""


def rule(
    q_TGD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_THV: torch.Tensor,
    log_decay_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    layout: Layout,
) -> torch.Tensor:
    """Decay the state, move what it holds for the key toward the value by beta, and read it with the query."""
    copies = v_THV.shape[1] // q_TGD.shape[1]
    q_THD, k_THD = (one.to(v_THV.dtype).repeat_interleave(copies, dim=1) for one in (q_TGD, k_TGD))
    empty_HDV = v_THV.new_zeros(v_THV.shape[1], q_TGD.shape[2], v_THV.shape[2])
    states: list[torch.Tensor] = []
    outs = []
    for row, before in enumerate(find_predecessors(layout)):
        state_HDV = empty_HDV if before is None else states[before]
        state_HDV = state_HDV * log_decay_TH[row].exp()[:, None, None]
        held_HV = (state_HDV * k_THD[row][:, :, None]).sum(dim=1)
        change_HV = beta_TH[row][:, None] * (v_THV[row] - held_HV)
        state_HDV = state_HDV + k_THD[row][:, :, None] * change_HV[:, None, :]
        states.append(state_HDV)
        outs.append((state_HDV * q_THD[row][:, :, None]).sum(dim=1) * q_TGD.shape[2] ** -0.5)
    return torch.stack(outs) if outs else v_THV


def find_predecessors(layout: Layout) -> list[int | None]:
    """Find the row before each token in its sequence; None for the first of a root."""
    starts = set(layout.starts.tolist())
    return [
        row - 1 if row not in starts else layout.last_row(layout.parents[int(layout.segment_of_token[row])])
        for row in range(layout.num_tokens)
    ]
