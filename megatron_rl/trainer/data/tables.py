"""The tables that a model's layers look up for a layout, made by the thread that makes packs."""

from collections.abc import Callable

import torch

from megatron_rl.config.settings import Settings
from megatron_rl.ops import gated_delta
from megatron_rl.ops.gated_delta.convolution import list_window_rows
from megatron_rl.ops.shared_prompt import BACKENDS
from megatron_rl.ops.shared_prompt.layout import Layout


def build_preparation(settings: Settings, device: torch.device) -> Callable[[Layout], None]:
    """Return the function that makes the tables of a layout, which keeps them."""
    attention, linear = BACKENDS.find(settings.attention.backend), settings.architecture.linear

    def prepare(layout: Layout) -> None:
        for window in settings.architecture.windows:
            attention.prepare(layout, device, window)
        if linear is not None:
            gated_delta.BACKENDS.find(settings.model.linear_attention_backend).prepare(layout)
            layout.once(list_window_rows, linear.window)

    return prepare
