"""A difference between a trainer and its engines, as an error or a warning."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

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
