"""The conditions under which Triton kernels of `ops` run, and their launches through compiled kernels that are kept.

It imports no Triton before it is called.

Triton finds the compiled kernel of a launch with checks that cost the host more than the launch. Here a launch asks
Triton only for what a kernel is compiled for: the device, and for each argument its type, the alignment of a pointer
and the class of an integer. Constants and options are compared by value.

Other launches take Triton's way: the first one with such arguments, and those of the interpreter. Launches under a
hook, in debug mode or with instrumentation take it too, and all launches in a version of Triton that was not checked.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

_log = logging.getLogger(__name__)
# Launchers of these versions take the arguments that `launch` gives.
_CHECKED_VERSIONS = ("3.7", "3.9")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refuse_triton(device: str, dtype: torch.dtype) -> str | None:
    """Refuse other dtypes and devices other than CUDA; on the CPU only Triton's interpreter runs the kernels."""
    if device not in ("cuda", "cpu"):
        return f"it is not known to work on {device}"
    if dtype not in _DTYPES:
        return "it supports fp32, fp16 and bf16 only"
    if not _has_triton():
        return "the package triton is not installed"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "on the CPU it needs Triton's interpreter, TRITON_INTERPRET=1"
    return None


@contextlib.contextmanager
def without_compile_hook() -> Iterator[None]:
    """Compile without the hook of another package, such as vLLM's, which warns of kernels after its warm-up or fails.

    Our kernels compile when an engine is prepared and at its first publish, while it serves no request.
    """
    try:
        from triton import knobs

        runtime: Any = knobs.runtime
        hook, runtime.jit_post_compile_hook = runtime.jit_post_compile_hook, None
    except (ImportError, AttributeError):
        # No Triton, or one that has no such hook, as Ascend's.
        yield
        return
    try:
        yield
    finally:
        runtime.jit_post_compile_hook = hook


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@dataclasses.dataclass(frozen=True)
class _Triton:
    """The parts of Triton that launches need."""

    driver: Any
    runtime: Any
    compilation: Any
    jit_names: dict[str, Any]
    jit_function: Any
    specialize: Callable[..., Any]


class _Launches:
    """The compiled kernels of one kernel on one device, by what they are compiled for."""

    def __init__(self, triton: _Triton, kernel: Any, device: int):
        # A kernel is known by its identity, so it must not be freed.
        self._kernel = kernel
        # All parameters after the last one that is not a constant have names.
        self.num_arguments = 1 + max(one.num for one in kernel.params if not one.is_constexpr)
        arguments, self._constants = kernel.params[: self.num_arguments], kernel.params[self.num_arguments :]
        self._places = [one.num for one in arguments if one.is_constexpr]
        self._specialize = triton.specialize
        self._backend = itertools.repeat(kernel.device_caches[device][3])
        self._flags = (
            [one.is_const for one in arguments],
            [not one.do_not_specialize for one in arguments],
            [not one.do_not_specialize_on_alignment for one in arguments],
        )
        self.kept: dict[Any, tuple[Any, ...]] = {}

    def find_key(self, arguments: Sequence[Any], constants: Mapping[str, Any]) -> Any:
        """Return what the kernel is compiled for."""
        classes = map(self._specialize, self._backend, arguments, *self._flags)
        return (*classes, *[arguments[place] for place in self._places], *constants.items())

    def keep(self, key: Any, compiled: Any, constants: Mapping[str, Any]) -> None:
        """Keep a compiled kernel with the values of all constants in the order of its parameters."""
        values = [constants.get(one.name, one.default) for one in self._constants]
        self.kept[key] = compiled.run, compiled.function, compiled.packed_metadata, values


_LAUNCHES: dict[tuple[int, int], _Launches] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on the current device and stream.

    By position it must be given all parameters up to the last one that is not a constant, and by name all others.
    """
    triton = _find_triton()
    if triton is None or type(kernel) is not triton.jit_function or not _is_plain(triton, kernel):
        kernel[grid](*arguments, **constants)
        return
    device = triton.driver.active.get_current_device()
    launches = _LAUNCHES.get((id(kernel), device))
    if launches is None:
        launches = _LAUNCHES[id(kernel), device] = _Launches(triton, kernel, device)
    assert len(arguments) == launches.num_arguments, f"{kernel} needs {launches.num_arguments} by position"
    key = launches.find_key(arguments, constants)
    found = launches.kept.get(key)
    if found is None:
        compiled = kernel[grid](*arguments, **constants)
        # A hook can keep Triton from compiling and launching.
        if compiled is not None:
            launches.keep(key, compiled, constants)
        return
    run, function, metadata, values = found
    columns, rows, layers = (*grid, 1, 1)[:3]
    stream = triton.driver.active.get_current_stream(device)
    # The three Nones: no hook before the launch, none after it, and nothing to tell them.
    run(columns, rows, layers, stream, function, metadata, None, None, None, *arguments, *values)


def is_kept(kernel: Any) -> bool:
    """Return whether any compiled kernel of this one is kept."""
    return any(launches.kept for (identity, _), launches in _LAUNCHES.items() if identity == id(kernel))


def _is_plain(triton: _Triton, kernel: Any) -> bool:
    """Check that nothing watches launches, and that kernels are compiled as usual."""
    runtime = triton.runtime
    # What replaces Triton's `run` counts launches. Its names differ from the names of Triton's module.
    return getattr(triton.jit_function.run, "__globals__", None) is triton.jit_names and not (
        kernel.pre_run_hooks
        or getattr(runtime.launch_enter_hook, "calls", True)
        or getattr(runtime.launch_exit_hook, "calls", True)
        or runtime.add_stages_inspection_hook
        or runtime.debug
        or triton.compilation.instrumentation_mode
    )


@functools.cache
def _find_triton() -> _Triton | None:
    """Find the parts of Triton; log it if this version was not checked."""
    import triton

    if not triton.__version__.startswith(tuple(f"{version}." for version in _CHECKED_VERSIONS)):
        _log.warning(
            "Each launch of a kernel takes Triton's way, which is slower: launches are kept with Triton %s, this is %s",
            " and ".join(_CHECKED_VERSIONS), triton.__version__,
        )  # fmt: skip
        return None
    from triton import knobs
    from triton.runtime import driver, jit

    specialize = jit.native_specialize_impl
    return _Triton(driver, knobs.runtime, knobs.compilation, vars(jit), jit.JITFunction, specialize)
