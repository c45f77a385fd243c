"""Which backend of shared-prompt attention a run has. Needs no megatron: flags are checked by it."""

from megatron_rl import platforms
from megatron_rl.config import Settings
from megatron_rl.ops.shared_prompt import Choice, Conditions, choose


def choice_of(settings: Settings) -> Choice:
    """What `--shared-prompt-backend` comes to on this platform, in this precision, for this model."""
    device = platforms.select(settings.platform).device_type
    conditions = Conditions(device, settings.transformer.params_dtype, settings.architecture.sliding_window)
    return choose(settings.attention.backend, conditions)
