"""Parameters that vLLM's multi-latent attention derives from others at the end of a load.

It multiplies queries and outputs by parts of `kv_b_proj`, kept in an order of its own. No tensor is loaded into these
parts, so they are compared with the tensor that they must follow from.

Letters: N heads of this rank, P plain columns of a head's key, V columns of its value, L columns of a narrow row.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

SOURCE = ".kv_b_proj.weight"
_KEYS, _VALUES = "W_UK_T", "W_UV"


def list_derived(model: torch.nn.Module) -> set[str]:
    """List the names of such parameters."""
    return {f"{name}.{kind}" for name, _ in _list_layers(model) for kind in (_KEYS, _VALUES)}


def find_stale(model: torch.nn.Module, given: Mapping[str, torch.Tensor], rank: int) -> list[str]:
    """Find the derived parameters that do not follow from the given tensors, whole and under their names."""
    stale = []
    for name, layer in _list_layers(model):
        source = name.partition(".self_attn.")[0] + ".self_attn" + SOURCE
        if source not in given:
            stale.append(f"{name} without {source}")
            continue
        keys_NPL, values_NLV = getattr(layer, _KEYS), getattr(layer, _VALUES)
        num_heads, plain, narrow = keys_NPL.shape
        whole = given[source].view(-1, plain + values_NLV.shape[2], narrow)
        own = whole[rank * num_heads : (rank + 1) * num_heads].to(keys_NPL)
        wanted = {_KEYS: own[:, :plain], _VALUES: own[:, plain:].transpose(1, 2)}
        stale += [f"{name}.{kind}" for kind, part in wanted.items() if not torch.equal(getattr(layer, kind), part)]
    return stale


def _list_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, layer in model.named_modules():
        if {_KEYS, _VALUES} <= layer._parameters.keys():
            yield name, layer
