"""The model that the policy is kept near to: its weights stay as they were loaded."""

import dataclasses
from pathlib import Path

import torch

from megatron_rl.config import Settings
from megatron_rl.mcore.build import model_of
from megatron_rl.mcore.frozen import frozen
from megatron_rl.mcore.session import Session
from megatron_rl.mcore.weights import ModelWeights


@dataclasses.dataclass(frozen=True)
class Reference:
    """This rank's part of it, without gradients, and the identity of its weights as they would be published."""

    chunks: list[torch.nn.Module]
    fingerprint: str


def reference_of(settings: Settings, session: Session, folder: Path) -> Reference:
    """The reference with the weights of a Hugging Face folder, of the policy's architecture."""
    chunks = model_of(settings, session.platform)
    weights = ModelWeights(chunks, session)
    weights.load_hf(folder)
    return Reference(frozen(chunks), weights.fingerprint(settings.publish.dtype))
