"""What a vLLM model holds, as a checksum of each parameter: whether a load has changed it.

Layers may pack a parameter into a layout of their own and let it go, as those of a CPU do: it is summed when that
happens, by `packed_away`, and all others are summed where they lie, after the load.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_rl.weights.fingerprint import checksum


@contextlib.contextmanager
def packed_away(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Checksums of the parameters that layers let go while this is open, as vLLM processes what was loaded."""
    names = {layer: name for name, layer in model.named_modules()}
    found: dict[str, torch.Tensor] = {}

    def watched(process: Callable[[torch.nn.Module], None]) -> Callable[[torch.nn.Module], None]:
        def call(layer: torch.nn.Module) -> None:
            parameters = dict(layer.named_parameters(recurse=False))
            process(layer)
            kept = dict(layer.named_parameters(recurse=False))
            for name, parameter in parameters.items():
                if parameter.numel() and not (name in kept and kept[name].numel()):
                    found[f"{names[layer]}.{name}"] = checksum(parameter)

        return call

    methods: dict[int, Any] = {
        id(method): method
        for layer in names
        if hasattr(method := getattr(layer, "quant_method", None), "process_weights_after_loading")
    }
    for method in methods.values():
        method.process_weights_after_loading = watched(method.process_weights_after_loading)
    try:
        yield found
    finally:
        for method in methods.values():
            del method.process_weights_after_loading


def checksums(model: torch.nn.Module, packed: dict[str, torch.Tensor]) -> dict[str, int]:
    """Of all parameters: those that lie in the model, and those that were packed away."""
    found = packed | {name: checksum(parameter) for name, parameter in model.named_parameters() if parameter.numel()}
    return {name: int(value) for name, value in found.items()}
