"""A hook into the import of megatron: patches are applied to a module when megatron itself imports it.

So nothing of megatron is imported for the sake of a patch, and no patch can come too late.
"""

import builtins
import dataclasses
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from megatron_rl import versions
from megatron_rl.errors import PlatformError


@dataclasses.dataclass(frozen=True)
class Patch:
    """One change to one module of megatron. The function's docstring is its reason."""

    name: str
    module: str
    apply: Callable[[ModuleType], None]

    @property
    def reason(self) -> str:
        return inspect.cleandoc(self.apply.__doc__ or "")


def install(patches: Iterable[Patch]) -> None:
    """Apply the patches to each module right after it has run."""
    hook = _hook()
    for patch in patches:
        hook.patches.setdefault(patch.module, []).append(patch)


def replace_import(function: Callable[..., ModuleType]) -> None:
    """Let `function` stand for `__import__` in megatron's modules, and nowhere else."""
    _hook().import_function = function


def expect_parameters(owner: Any, name: str, *expected: str) -> Callable[..., Any]:
    """The function `owner.name`, or an error if it does not take the parameters a patch was written for."""
    function = getattr(owner, name, None)
    found = tuple(inspect.signature(function).parameters) if function is not None else None
    if function is None or found != expected:
        state = "is not there" if found is None else f"takes ({', '.join(found)})"
        raise unknown_megatron(f"{owner.__name__}.{name} {state}, expected ({', '.join(expected)})")
    return function


def unknown_megatron(what: str) -> PlatformError:
    """The error for a megatron-core whose code is not what a patch was written for."""
    found = versions.installed("megatron-core") or "unknown"
    return PlatformError(
        f"megatron-core {found}: {what}; a patch of megatron_rl does not know this version: install megatron-core "
        f"{versions.MEGATRON_CORE.wanted}"
    )


class _Finder:
    """Finds what the other finders find, and gives megatron's source modules a loader of ours."""

    def __init__(self) -> None:
        self.patches: dict[str, list[Patch]] = {}
        self.import_function: Callable[..., ModuleType] | None = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("megatron."):
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self else None
            if spec is not None:
                break
        else:
            return None
        if type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self)
        elif name in self.patches:
            raise unknown_megatron(f"{name} is loaded by {type(spec.loader).__name__}, not from a source file")
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Runs a module of megatron with our `__import__`, then patches it."""

    def __init__(self, name: str, path: str, finder: _Finder) -> None:
        super().__init__(name, path)
        self._finder = finder

    def exec_module(self, module: ModuleType) -> None:
        if self._finder.import_function is not None:
            # Python looks `__import__` up among the builtins of the globals that the import statement runs in.
            module.__dict__["__builtins__"] = _builtins_with(self._finder.import_function)
        super().exec_module(module)
        for patch in self._finder.patches.get(self.name, ()):
            patch.apply(module)


def _builtins_with(import_function: Callable[..., ModuleType]) -> Mapping[str, Any]:
    """Python's builtins with another `__import__`."""
    return {**vars(builtins), "__import__": import_function}


def _hook() -> _Finder:
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            return finder
    hook = _Finder()
    sys.meta_path.insert(0, hook)
    return hook
