"""Adapters of the small models for real engines: published alone, and merged into a folder of weights."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megatron_rl.shared.protocol.wire import FileSource, Weights
from megatron_rl.shared.weights.adapters import AdapterMapping, name_factors
from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.shared.weights.files import read_digests, read_fingerprint, write_digests
from megatron_rl.shared.weights.fingerprint import compute_fingerprint, digest
from megatron_rl.shared.weights.mapping import Mapping
from megatron_rl.sidecar.vllm.received import list_specs

RANK = 4


def draw_factors(model: Path, seed: int) -> dict[str, torch.Tensor]:
    """Draw all factors of a model, with the scale in B: large enough that the policy is another one."""
    generator = torch.Generator().manual_seed(seed)
    specs = AdapterMapping(Mapping(read_architecture(model)), RANK).manifest("float32")
    return {spec.name: 0.2 * torch.randn(spec.shape, generator=generator) for spec in specs}


def merge(model: Path, factors: dict[str, torch.Tensor], folder: Path) -> Path:
    """Write a model's folder with the adapters in its weights, which is what the adapters mean."""
    shutil.copytree(model, folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, weight in weights.items():
        a, b = (factors.get(factor) for factor in name_factors(name.removesuffix(".weight")))
        if a is not None and b is not None:
            weights[name] = (weight.double() + b.double() @ a.double()).to(weight.dtype)
    save_file(weights, path, metadata={"format": "pt"})
    return folder


@contextmanager
def published(model: Path, factors: dict[str, torch.Tensor], version: int) -> Iterator[Weights]:
    """Write the adapters as the trainer's publisher leaves them, and announce them on the model as their base."""
    folder = Path(tempfile.mkdtemp(prefix="megatron-rl-test-", dir="/dev/shm"))
    base = read_fingerprint(model, Mapping(read_architecture(model)), "float32")
    try:
        save_file(factors, folder / "model.safetensors")
        (folder / "model.safetensors").chmod(0o600)
        write_digests(folder, {name: digest(tensor).tolist() for name, tensor in factors.items()})
        yield Weights(
            run="test",
            version=version,
            fingerprint=compute_fingerprint(list_specs(factors), read_digests(folder), base),
            dtype="float32",
            source=FileSource(folder=str(folder)),
            base=base,
        )
    finally:
        shutil.rmtree(folder)
