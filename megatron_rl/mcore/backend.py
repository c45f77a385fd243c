"""Which backend of shared-prompt attention a run has. Needs no megatron: flags are checked by it."""

import torch

from megatron_rl import platforms
from megatron_rl.config import Settings
from megatron_rl.ops.shared_prompt import Choice, Conditions, choose


def backend_of(settings: Settings) -> Choice:
    """What `--shared-prompt-backend` comes to on this platform, in this precision, for this model."""
    dtype = torch.float32
    if settings.transformer.get("bf16"):
        dtype = torch.bfloat16
    elif settings.transformer.get("fp16"):
        dtype = torch.float16
    device = platforms.select(settings.platform).device_type
    return choose(settings.attention.backend, Conditions(device, dtype, settings.architecture.sliding_window))
