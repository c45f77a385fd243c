"""A stand-in for torchvision, whose build for CPUs PyPI lacks: models of images import it, and text never calls it."""

import importlib.machinery
import sys
import types
from typing import Any

__version__ = "0.0"


class _Module(types.ModuleType):
    """A module that has any name."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names() if name == "InterpolationMode" else type(name, (), {})


class _Names:
    def __getattr__(self, name: str) -> str:
        return name


for _name in ("transforms", "transforms.v2", "transforms.functional", "transforms.v2.functional", "io", "ops"):
    _module = _Module(f"{__name__}.{_name}")
    _module.__spec__ = importlib.machinery.ModuleSpec(_module.__name__, None, is_package=True)
    sys.modules[_module.__name__] = _module
    _parent, _, _child = _module.__name__.rpartition(".")
    setattr(sys.modules[_parent], _child, _module)
