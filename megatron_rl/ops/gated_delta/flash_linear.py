"""The gated delta rule by the package flash-linear-attention, one call for each level of segments.

Letters: T tokens, L tokens of a level, S segments of a level, G key heads, H value heads, D dimensions of a query and a
key, V of a value.
"""

import dataclasses
import importlib.util
from typing import Any

import numpy as np
import torch

from megatron_rl.ops.backends import Conditions
from megatron_rl.ops.gated_delta.chunks import StateLevel, find_filled_parent, find_levels
from megatron_rl.ops.shared_prompt.layout import ROOT, Layout
from megatron_rl.ops.shared_prompt.tables import find_tables


@dataclasses.dataclass(frozen=True)
class Calls:
    """The calls for a layout: the segments of a level that have tokens are the sequences of one."""

    rows: list[torch.Tensor]
    """The rows of each call, [L]."""
    offsets: list[torch.Tensor]
    """The first row of each sequence of a call, and the call's number of rows: [S + 1]."""
    levels: list[StateLevel]
    places_T: torch.Tensor
    """The place of each row among the rows of all calls."""

    @classmethod
    def of(cls, layout: Layout) -> "Calls":
        """List the calls."""
        filled = [segment for segment, length in enumerate(layout.lengths) if length]
        numbers = {segment: number for number, segment in enumerate(filled)}
        parents = [find_filled_parent(layout, segment) for segment in filled]
        order, levels = find_levels([None if parent == ROOT else numbers[parent] for parent in parents])
        rows, offsets = [], []
        for level in levels:
            segments, order = [filled[number] for number in order[: level.num_parts]], order[level.num_parts :]
            parts = [np.arange(layout.starts[one], layout.starts[one + 1]) for one in segments]
            rows.append(torch.from_numpy(np.concatenate(parts)))
            offsets.append(torch.from_numpy(np.cumsum([0, *map(len, parts)])))
        places_T = torch.cat(rows).argsort() if rows else torch.zeros(0, dtype=torch.long)
        return cls(rows, offsets, levels, places_T)


def refusal(conditions: Conditions) -> str | None:
    """Refuse other devices than CUDA, full precision, and a missing package."""
    if conditions.device != "cuda":
        return f"flash-linear-attention has no kernels for {conditions.device}"
    if importlib.util.find_spec("fla") is None:
        return "flash-linear-attention is not installed"
    if not conditions.is_half:
        return "it needs --bf16 or --fp16"
    return None


def prepare(layout: Layout) -> Calls:
    return layout.once(Calls.of)


def rule(
    q_TGD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_THV: torch.Tensor,
    log_decay_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    layout: Layout,
) -> torch.Tensor:
    """Compute the same as `naive.rule`."""
    if layout.num_tokens == 0:
        return v_THV
    chunk_gated_delta_rule = _import_function()
    calls = find_tables(layout, q_TGD.device, Calls.of)
    # Releases differ in whether value heads may share a key head.
    copies = v_THV.shape[1] // q_TGD.shape[1]
    q_THD, k_THD = (one.to(v_THV.dtype).repeat_interleave(copies, dim=1) for one in (q_TGD, k_TGD))
    states_SHDV: torch.Tensor | None = None
    outs = []
    for rows_L, offsets, level in zip(calls.rows, calls.offsets, calls.levels, strict=True):
        inputs = (one.index_select(0, rows_L)[None] for one in (q_THD, k_THD, v_THV, log_decay_TH, beta_TH))
        initial_SHDV = None if states_SHDV is None else states_SHDV.index_select(0, level.above)
        is_continued = len(level.continued) > 0
        out_1LHV, final_SHDV = chunk_gated_delta_rule(
            *inputs,
            scale=q_TGD.shape[2] ** -0.5,
            initial_state=initial_SHDV,
            output_final_state=is_continued,
            cu_seqlens=offsets,
        )
        outs.append(out_1LHV[0])
        states_SHDV = final_SHDV.index_select(0, level.continued) if is_continued else None
    return torch.cat(outs).index_select(0, calls.places_T)


def _import_function() -> Any:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule
