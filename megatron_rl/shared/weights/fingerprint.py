"""The identity of a set of weights, computable on any device from any slicing of the tensors.

It follows from the digest of each tensor, which `ops.slices.naive` defines: the sum of the digests of any slices that
cover the tensor once.
"""

import hashlib
from collections.abc import Iterable, Mapping

import torch

from megatron_rl.ops.slices.naive import NUM_LANES, digest, digest_each, digests_by_row
from megatron_rl.shared.weights.mapping import TensorSpec

__all__ = ["DTYPES", "NUM_LANES", "compute_fingerprint", "digest", "digest_each", "digests_by_row"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def compute_fingerprint(specs: Iterable[TensorSpec], digests: Mapping[str, Iterable[int]], base: str = "") -> str:
    """Compute the fingerprint of a model from the digests of its tensors.

    If these are adapters, the fingerprint covers that of their base too.
    """
    whole = hashlib.sha256(f"base\t{base}\n".encode() if base else b"")
    for spec in sorted(specs, key=lambda spec: spec.name):
        lanes = ",".join(f"{lane & (2**64 - 1):016x}" for lane in digests[spec.name])
        whole.update(f"{spec.name}\t{spec.dtype}\t{'x'.join(map(str, spec.shape))}\t{lanes}\n".encode())
    return whole.hexdigest()
