"""Parts of the callbacks for trainers of others: a difference as an error or a warning, and weights as a folder."""

import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_rl.errors import MegatronRLError
from megatron_rl.verify.command import describe_worker, is_equal


class NotSynced(MegatronRLError, RuntimeError):
    """An engine holds other weights than its trainer."""


def must_be_equal(answers: Sequence[Mapping[str, Any]], warns: bool) -> None:
    """Raise NotSynced, or warn, unless every worker holds what it was compared with."""
    if wrong := [line for answer in answers if not is_equal(answer) for line in describe_worker(answer)]:
        report("\n".join(["vLLM holds other weights than the trainer:", *wrong]), warns)


def report(text: str, warns: bool) -> None:
    """Raise NotSynced, or warn."""
    if not warns:
        raise NotSynced(text)
    warnings.warn(text, stacklevel=2)


def make_shared_folder(place: str | None) -> tempfile.TemporaryDirectory[str]:
    """Make a folder that the engines of this host can read: in memory, if no other place is named."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=place or (memory if memory.is_dir() else None))


def saving(weights: Iterable[tuple[str, torch.Tensor]], folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights, and save each in a file of its own."""
    from safetensors.torch import save_file

    for number, (name, tensor) in enumerate(weights):
        save_file({name: tensor.detach().contiguous()}, f"{folder}/{number}.safetensors")
        yield name, tensor
