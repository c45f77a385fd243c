"""The files of a person's own code that a run trains with: losses and the like, and the family of the model."""

from megatron_rl.algorithm.plug_ins import describe_plug_ins
from megatron_rl.config.settings import DraftSettings
from megatron_rl.shared.weights.families import describe_guest


def describe_own_files(settings: DraftSettings) -> dict[str, str]:
    """Map each flag with its FILE.py:NAME to the hash of the file."""
    return describe_plug_ins(settings.algorithm) | describe_guest(settings.model.weights_bridge)
