"""The parts of `make gpu-bench`: how long each may take, and what it needs."""

import dataclasses
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


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
    has_rival: bool = False
    """True if the part runs TRL too, which has an environment of its own."""


TRAINS = ("megatron", "msgspec", "safetensors", "tokenizers", "transformers")
SERVES = (*TRAINS, "vllm", "httpx", "psutil")

# In the order in which they run: the last ones are left out if time is short. Together they have ten minutes. The rival
# is first, so that all others have its seconds if it is not installed.
PARTS: Mapping[str, Part] = {
    "rival": Part("rival", ("rival",), 130, 120, SERVES, "0.6b", 75, has_rival=True),
    "attention": Part("attention", ("attention",), 35, 10),
    "output_layer": Part("output_layer", ("output_layer",), 15, 5),
    "kernels": Part("kernels", ("kernels", "launches"), 30, 10),
    "step_0.6b": Part("step", ("step",), 55, 20, TRAINS, "0.6b", 30),
    "start": Part("start", ("start", "schedules"), 100, 40, SERVES, "0.6b", 45),
    "service": Part("service", ("publish", "generation", "schedules"), 105, 60, SERVES, "0.6b", 60),
    "step_1.7b": Part("step", ("step",), 30, 25, TRAINS, "1.7b", 60),
    "step_4b": Part("step", ("step",), 40, 35, TRAINS, "4b", 90),
    "publish_8b": Part("publish", ("publish",), 60, 60, SERVES, "8b", 45),
}

REMEDY = "`make gpu-bench` without PYTHON= installs all of them into .venv-cuda"


ROOT = Path(__file__).resolve().parents[2]
# TRL's environments: the one for GPUs, and that of `make test-trl`, which has no vLLM that TRL supports.
RIVAL, TINY_RIVAL = ROOT / ".venv-rival", ROOT / ".venv-trl"
OF_RIVAL = ("trl", "accelerate", "datasets")
NO_RIVAL = "trl is not installed: `make rival` installs it into .venv-rival, with the vLLM that it supports"
_FIND = "import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, sys.argv[1:])))"


def find_rival(is_tiny: bool) -> Path | None:
    """Return the Python that has TRL, and on a GPU vLLM; None if no environment has them."""
    names = OF_RIVAL if is_tiny else (*OF_RIVAL, "vllm")
    folders = (RIVAL, TINY_RIVAL) if is_tiny else (RIVAL,)
    for python in (*(folder / "bin" / "python" for folder in folders), Path(sys.executable)):
        if python.exists() and subprocess.run([python, "-c", _FIND, *names], check=False).returncode == 0:
            return python
    return None


def is_importable(name: str) -> bool:
    """Return whether a package is installed, without importing it."""
    return importlib.util.find_spec(name) is not None


def find_missing(part: Part, is_installed: Callable[[str], bool] = is_importable) -> Sequence[str]:
    """Return the part's packages that are not installed."""
    return [name for name in part.packages if not is_installed(name)]
