"""Precisions by name: that in which a policy is trained, published and sampled from."""

_COARSER = ("float64", "float32", "float16", "bfloat16")
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def find_coarsest_dtype(*dtypes: str) -> str:
    """Return the dtype with the fewest bits of precision."""
    return max(dtypes, key=_COARSER.index)


def find_narrower(trained: str, stored: str) -> str:
    """Return the dtype of fewer bytes, which loses nothing that both have; of equally many, the one trained in."""
    return stored if _BYTES[stored] < _BYTES[trained] else trained


def can_hold(dtype: str, published: str) -> bool:
    """Check whether numbers of the published dtype keep every bit in this one, so that they can be compared in it."""
    return dtype == published or _BYTES[dtype] > _BYTES[published]
