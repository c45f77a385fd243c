"""The parts of `make gpu-bench`: how long each may take, and what it needs."""

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Part:
    """One part, which a process of its own measures."""

    module: str
    """The module in this folder whose `measure` is called."""
    tables: tuple[str, ...]
    """The tables that it adds rows to."""
    seconds: float
    """Seconds that it may take; seconds that earlier parts left are added."""
    least: float
    """Seconds without which it is not started."""
    packages: tuple[str, ...] = ()
    """The names under which its packages are imported, besides torch and numpy."""
    model: str = ""
    """The size of its model, as in `models.SIZES`."""
    gib: float = 0
    """GiB of memory that the GPU must have."""


TRAINS = ("megatron", "msgspec", "safetensors", "tokenizers", "transformers")
SERVES = (*TRAINS, "vllm", "httpx", "psutil")

# In the order in which they run: the last ones are left out if time is short. Together they have ten minutes.
PARTS: Mapping[str, Part] = {
    "attention": Part("attention", ("attention",), 45, 10),
    "output_layer": Part("output_layer", ("output_layer",), 20, 5),
    "step_0.6b": Part("step", ("step",), 85, 20, TRAINS, "0.6b", 30),
    "start": Part("start", ("start", "schedules"), 135, 40, SERVES, "0.6b", 45),
    "service": Part("service", ("publish", "generation", "schedules"), 175, 60, SERVES, "0.6b", 60),
    "step_1.7b": Part("step", ("step",), 30, 25, TRAINS, "1.7b", 60),
    "step_4b": Part("step", ("step",), 40, 35, TRAINS, "4b", 90),
    "publish_8b": Part("publish", ("publish",), 70, 60, SERVES, "8b", 45),
}

REMEDY = "`make gpu-bench` without PYTHON= installs all of them into .venv-cuda"


def is_importable(name: str) -> bool:
    """Return whether a package is installed, without importing it."""
    return importlib.util.find_spec(name) is not None


def find_missing(part: Part, is_installed: Callable[[str], bool] = is_importable) -> Sequence[str]:
    """Return the part's packages that are not installed."""
    return [name for name in part.packages if not is_installed(name)]
