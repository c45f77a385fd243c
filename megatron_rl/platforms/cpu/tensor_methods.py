"""Methods of torch's tensors and modules that answer megatron, and only megatron, as if the host were CUDA.

A method belongs to everyone's tensors, so each of these looks at who calls, and for all others is what it was.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

_TYPE_NAMES = {
    f"torch.{kind}Tensor": f"torch.cuda.{kind}Tensor" for kind in ("Float", "Half", "BFloat16", "Double", "Int", "Long")
}


def tensor_cuda() -> None:
    """megatron moves tensors with .cuda(); a CPU build of torch raises."""
    _answer_megatron(torch.Tensor, "cuda", lambda tensor, *arguments, **keywords: tensor)


def module_cuda() -> None:
    """megatron moves modules with .cuda(); a CPU build of torch raises."""
    _answer_megatron(torch.nn.Module, "cuda", lambda module, *arguments, **keywords: module)


def tensor_type() -> None:
    """megatron's optimizers sort parameters by type(), and raise on one that is not called torch.cuda.*Tensor."""
    original = torch.Tensor.type

    def type_name(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        result = original(tensor, *arguments, **keywords)
        return _TYPE_NAMES.get(result, result) if isinstance(result, str) else result

    _answer_megatron(torch.Tensor, "type", type_name)


METHODS: tuple[tuple[str, Callable[[], None]], ...] = (
    ("torch.Tensor.cuda", tensor_cuda),
    ("torch.nn.Module.cuda", module_cuda),
    ("torch.Tensor.type", tensor_type),
)


def install() -> None:
    for _, patch in METHODS:
        patch()


def reasons() -> list[tuple[str, str]]:
    return [(name, inspect.cleandoc(patch.__doc__ or "")) for name, patch in METHODS]


def _answer_megatron(owner: type, name: str, answer: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        function = answer if caller.startswith("megatron.") else original
        return function(self, *arguments, **keywords)

    setattr(owner, name, method)
