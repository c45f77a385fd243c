"""Command lines for tests, and what becomes of them."""

import pytest

from megatron_rl import arguments, config
from megatron_rl.errors import ExitCode, UsageError

CPU = ("--platform", "cpu")
DENSE = (
    *CPU,
    *["--num-layers", "8", "--hidden-size", "64", "--num-attention-heads", "8", "--ffn-hidden-size", "96"],
    *["--group-query-attention", "--num-query-groups", "4", "--max-position-embeddings", "128", "--vocab-size", "100"],
    *["--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear"],
)
SPARSE = (*DENSE, "--qk-layernorm", *["--num-experts", "8", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "48"])


def parse(*words: str, world_size: int | None = None) -> config.Settings:
    """The settings, as one of so many ranks, or as no rank of a launcher."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WORLD_SIZE", raising=False)
        if world_size is not None:
            patch.setenv("WORLD_SIZE", str(world_size))
        return arguments.parse([word for text in words for word in text.split()])


def error(*words: str, world_size: int | None = None) -> str:
    """The text of the usage error that the words end in."""
    with pytest.raises(UsageError) as raised:
        parse(*words, world_size=world_size)
    assert raised.value.exit_code == ExitCode.USAGE
    return str(raised.value)
