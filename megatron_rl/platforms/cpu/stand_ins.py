"""What megatron is given for CUDA's streams and events: on the CPU all work is done in the order it is asked for."""

from typing import Any

import torch

DEVICE = torch.device("cpu")


class Event:
    """A marker in the only queue there is; whoever asks finds it passed."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """Takes what torch.cuda.Event takes."""

    def record(self, stream: Any = None) -> None:
        """Nothing is queued, so there is nothing to mark."""

    def wait(self, stream: Any = None) -> None:
        """What was asked for earlier is done."""

    def synchronize(self) -> None:
        """What was asked for earlier is done."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds between two markers: nothing is queued, so no time passes between them."""
        return 0.0


class Stream:
    """The only queue there is."""

    device = DEVICE
    cuda_stream = 0

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """Takes what torch.cuda.Stream takes."""

    def wait_stream(self, stream: Any) -> None:
        """What was asked for earlier is done."""

    def wait_event(self, event: Any) -> None:
        """What was asked for earlier is done."""

    def synchronize(self) -> None:
        """What was asked for earlier is done."""

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None:
        """The queue stays the only one."""


class AnyIndex:
    """A sequence whose every element is the same, whatever the index: one device stands for all."""

    def __init__(self, element: Any) -> None:
        self._element = element

    def __getitem__(self, index: Any) -> Any:
        return self._element


def nothing(*arguments: Any, **keywords: Any) -> None:
    """Takes anything and does nothing."""


def zero(*arguments: Any, **keywords: Any) -> int:
    """Takes anything and returns 0."""
    return 0
