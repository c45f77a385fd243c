"""Shared-prompt attention whose result for a row depends on its own sequence alone, to the last bit.

The forward pass is that of `ops.invariant.attention`, by which engines attend too. Gradients are those of `merge`, with
this pass's results and denominators.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from megatron_rl.ops.backends import Conditions
from megatron_rl.ops.invariant.attention import Tiles, attend, pad_keys
from megatron_rl.ops.shared_prompt.backends import merge
from megatron_rl.ops.shared_prompt.backends.flash_cpu import CpuFlash
from megatron_rl.ops.shared_prompt.layout import ROOT, Layout


@dataclasses.dataclass(frozen=True)
class InvariantFlash:
    """Tables of a layout, whose sequences are the paths to its segments."""

    tiles: Tiles
    keys_SL: torch.Tensor
    """The row of each position on the path to a segment; the path's first row after its end."""
    gradients: CpuFlash

    @classmethod
    def of(cls, layout: Layout) -> "InvariantFlash":
        starts = layout.starts.tolist()
        paths: list[np.ndarray] = []
        for segment, parent in enumerate(layout.parents):
            own = np.arange(starts[segment], starts[segment + 1])
            paths.append(own if parent == ROOT else np.concatenate((paths[parent], own)))
        keys_SL = np.zeros((len(paths), pad_keys(max(map(len, paths)))), dtype=np.int64)
        for row_L, path in zip(keys_SL, paths, strict=True):
            row_L[:] = path[0] if len(path) else 0
            row_L[: len(path)] = path
        tiles = Tiles.of(torch.from_numpy(layout.segment_of_token), torch.from_numpy(layout.positions))
        return cls(tiles, torch.from_numpy(keys_SL), CpuFlash.of(layout))

    def forward(self, inputs: Sequence[torch.Tensor], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output, and the logarithm of each softmax's denominator [T, H]."""
        q_THD, *keys_and_values = inputs
        return attend(q_THD, torch.cat(keys_and_values, dim=-1), self.tiles, self.keys_SL, scale)

    def backward(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], scale: float
    ) -> list[torch.Tensor]:
        """Return the gradients of queries, keys and values from the output's, and from the results of `forward`."""
        return self.gradients.backward(inputs, outputs, scale)


def refusal(conditions: Conditions) -> str | None:
    """Refuse what no engine computes in the same way."""
    if conditions.device != "cpu":
        return f"engines have no attention of the same bits on {conditions.device}"
    if conditions.dtype not in (torch.float32, torch.bfloat16):
        return "it is for float32 and bfloat16"
    if conditions.window is not None:
        return "it has no sliding window"
    if conditions.has_sinks:
        return "it has no sinks"
    return None


def prepare(layout: Layout, device: torch.device, window: int | None = None) -> InvariantFlash:
    return layout.once(InvariantFlash.of)


def attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGV: torch.Tensor,
    layout: Layout,
    scale: float,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the same as `naive.attention`, without a window and sinks."""
    assert window is None and sinks_H is None
    return merge.attend_and_merge(q_THD, k_TGD, v_TGV, layout, scale, None, InvariantFlash.of)
