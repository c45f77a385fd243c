"""The models that are measured, with random weights: Qwen3's sizes, and one for the CPU."""

import dataclasses
import shutil
from pathlib import Path

from megatron_rl.types import Architecture

LARGEST_VOCABULARY = 151_936


def _draw_up(num_layers: int, hidden_size: int, ffn_hidden_size: int, num_heads: int, is_tied: bool) -> Architecture:
    return Architecture(
        family="qwen3", num_layers=num_layers, hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size,
        num_attention_heads=num_heads, num_query_groups=8, kv_channels=128, vocab_size=LARGEST_VOCABULARY,
        max_position_embeddings=32_768, tied_embeddings=is_tied, qk_layernorm=True, dtype="bfloat16",
    )  # fmt: skip


SIZES = {
    "0.6b": _draw_up(28, 1024, 3072, 16, is_tied=True),
    "1.7b": _draw_up(28, 2048, 6144, 16, is_tied=True),
    "4b": _draw_up(36, 2560, 9728, 32, is_tied=True),
    "8b": _draw_up(36, 4096, 12_288, 32, is_tied=False),
}
TINY = dataclasses.replace(
    SIZES["0.6b"], num_layers=2, hidden_size=64, ffn_hidden_size=192, num_attention_heads=4, num_query_groups=2,
    kv_channels=32, vocab_size=512, max_position_embeddings=1024, dtype="float32",
)  # fmt: skip
_MADE = "made"


def make_once(folder: Path, architecture: Architecture, device: str) -> Path:
    """Write the model's folder, unless an earlier part has; the weights are drawn on the device."""
    # Imported here: the table of sizes needs no packages.
    import torch

    from benchmarks import random_models

    if not (folder / _MADE).exists():
        # A part that was ended may have left a piece of it.
        shutil.rmtree(folder, ignore_errors=True)
        random_models.make(folder, architecture, device)
        (folder / _MADE).touch()
        if device == "cuda":
            torch.cuda.empty_cache()
    return folder
