"""Values of config.json, checked as they are read."""

import math
from collections.abc import Mapping
from typing import Any

from megatron_rl.errors import InputError


def get_required(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key that must be there."""
    if key not in config:
        raise InputError(f"config.json must have {key}, which the model is built with")
    return config[key]


def read_count(config: Mapping[str, Any], key: str, value: Any = None, least: int = 1) -> int:
    """Return a whole number: `value`, or that of the key."""
    value = get_required(config, key) if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{key} = {value!r} in config.json must be a whole number of at least {least}")
    return value


def read_positive(config: Mapping[str, Any], key: str) -> float:
    """Return a finite number above 0."""
    value = get_required(config, key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise InputError(f"{key} = {value!r} in config.json must be a finite number above 0")
    return float(value)


def read_boolean(config: Mapping[str, Any], key: str) -> bool:
    """Return true or false."""
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise InputError(f"{key} = {value!r} in config.json must be true or false")
    return value


SCALED_BLOCK = 128
"""Number of rows, and of columns, that share a factor of weights in scaled blocks (`stored_forms.py`)."""
# The one format of a quantization_config that is read, that of DeepSeek-V3.
_SCALED = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", "float8_e4m3fn", None),
    "weight_block_size": ([SCALED_BLOCK, SCALED_BLOCK],),
}


def find_other_format(quantization: Mapping[str, Any]) -> str | None:
    """Return a setting of another format of quantized weights; None if the format is the one that is read."""
    for key, allowed in _SCALED.items():
        if (value := quantization.get(key)) not in allowed:
            return f"{key} = {value!r}"
    return None
