"""The quantization_config of a config.json: one format is read, that of DeepSeek-V3 (`stored_forms.py`)."""

from collections.abc import Mapping
from typing import Any

BLOCK = 128
"""Number of rows, and of columns, that share a factor."""

_WANTED = {"quant_method": ("fp8",), "fmt": ("e4m3", "float8_e4m3fn", None), "weight_block_size": ([BLOCK, BLOCK],)}


def find_other_format(quantization: Mapping[str, Any]) -> str | None:
    """Return a setting of another format; None if the format is the one that is read."""
    for key, allowed in _WANTED.items():
        if (value := quantization.get(key)) not in allowed:
            return f"{key} = {value!r}"
    return None
