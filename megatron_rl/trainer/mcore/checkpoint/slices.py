"""The state of Megatron's distributed optimizer as shards of whole parameters, in the optimizer's own memory.

A data-parallel rank keeps a range of each parameter's elements, in row-major order. Such a range consists of boxes: the
rest of a row, whole rows, the beginning of a row. Each box is a shard of the whole parameter's tensor. So a save
gathers nothing, and a load reads only a rank's own elements, into their place. The files have Megatron's
`fully_reshardable` form, with more shards: each tensor whole, under its parameter's name, which every layout reads.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_rl.platforms.megatron_patches import expect_parameters, unknown_megatron

Shape = tuple[int, ...]
# The boxes of each tensor, in the order of their elements: by the parameter's number, the tensor's key, and a count.
State = dict[int, dict[str, dict[int, Any]]]
_PREFIX = "optimizer.state"
# The tensors that Adam keeps. From 0.19 on, the optimizer names them itself.
_KEYS = ("exp_avg", "exp_avg_sq")
_DESCRIBE, _LOAD = "sharded_param_state_fully_reshardable", "load_parameter_state_from_fully_reshardable"


def boxes(shape: Sequence[int], start: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    """Cut elements `start` to `end` of a tensor, in row-major order, into boxes: yield the offset and size of each.

    Boxes come in the order of their elements, and each is contiguous. Every axis except the last adds at most two.
    """
    if start >= end:
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row
    if start % row:
        for offset, size in boxes(shape[1:], start % row, min(end - (first - 1) * row, row)):
            yield (first - 1, *offset), (1, *size)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if end % row and last >= first:
        for offset, size in boxes(shape[1:], 0, end % row):
            yield (last, *offset), (1, *size)


@contextlib.contextmanager
def in_slices(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Let distributed optimizers describe and load the `fully_reshardable` form in slices."""
    expect_parameters(DistributedOptimizer, _DESCRIBE, "self", "model_sharded_state_dict", "is_loading", "metadata")
    expect_parameters(DistributedOptimizer, _LOAD, "self", "state_dict")
    changed = [
        one for one in getattr(optimizer, "chained_optimizers", [optimizer]) if isinstance(one, DistributedOptimizer)
    ]
    for one in changed:
        setattr(one, _DESCRIBE, functools.partial(_describe, one))
        setattr(one, _LOAD, functools.partial(_load, one))
    try:
        yield
    finally:
        for one in changed:
            delattr(one, _DESCRIBE)
            delattr(one, _LOAD)


def _describe(
    optimizer: DistributedOptimizer, model: dict[str, Any], is_loading: bool = False, metadata: Any = None
) -> State:
    parts = {part.data: part for part in nested_values(model) if isinstance(part, ShardedTensor | ShardedTensorFactory)}
    return {
        index: {
            key: dict(enumerate(_make_shards(parts[parameter], key, place, values, optimizer)))
            for key, values in _get_tensors(optimizer, parameter).items()
        }
        for index, parameter, place in _list_own_parts(optimizer)
    }


@torch.no_grad()
def _load(optimizer: DistributedOptimizer, state: State) -> None:
    for index, parameter, _ in _list_own_parts(optimizer):
        tensors = {
            key: torch.cat([pieces[number].flatten() for number in sorted(pieces)])
            for key, pieces in state[index].items()
        }
        optimizer._set_main_param_and_optimizer_states(parameter, tensors)
    # An optimizer with its state on the host keeps a second list of the state.
    synchronize = getattr(optimizer.optimizer, "_sync_hdo_state_to_sub_optimizers", None)
    if synchronize is not None:
        synchronize()


def _list_own_parts(optimizer: DistributedOptimizer) -> Iterator[tuple[int, torch.nn.Parameter, range]]:
    """Yield each parameter that this rank has a part of, with its number among all and the part's elements."""
    number = 0
    for buffer, of_dtypes in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
        own = {
            parameter: range(ranges["param"].start, ranges["param"].end)
            for buckets in of_dtypes.values()
            for bucket in buckets
            for parameter, ranges in bucket["param_map"].items()
        }
        for parameter in buffer.param_index_map:
            if own.get(parameter):
                yield number, parameter, own[parameter]
            number += 1


def _get_tensors(optimizer: DistributedOptimizer, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Return this rank's part of a parameter's state in single precision, without a copy if possible."""
    tensors = optimizer._get_main_param_and_optimizer_states(parameter)
    return {key: tensors[key].detach().float() for key in ("param", *getattr(optimizer, "optimizer_state_keys", _KEYS))}


def _make_shards(
    part: ShardedTensor | ShardedTensorFactory,
    key: str,
    place: range,
    values: torch.Tensor,
    optimizer: DistributedOptimizer,
) -> Iterator[ShardedTensor]:
    """Yield `values`, the elements `place` of the tensor of `part`, as shards under the parameter's name and `key`."""
    # Data-parallel ranks have no copies of each other's parts. The model's third number counts such copies.
    replica = (*part.replica_id[:2], optimizer.distributed_optimizer_instance_id)
    for whole in _describe_wholes(part, f"{_PREFIX}.{key}.{part.key}", replica):
        # Where the tensor begins in the parameter, and which of its elements this rank has.
        begin = whole.data.storage_offset()
        start, end = max(place.start - begin, 0), min(place.stop - begin, whole.data.numel())
        at = begin + start - place.start
        new_axes = (1,) * whole.prepend_axis_num
        for offset, size in boxes(whole.local_shape, start, end):
            length = math.prod(size)
            data = values[at : at + length].view(*new_axes, *size)
            at += length
            yield dataclasses.replace(
                whole,
                data=data,
                local_shape=(*new_axes, *size),
                global_offset=tuple(map(sum, zip(whole.global_offset, (*(0 for _ in new_axes), *offset), strict=True))),
                # Boxes have many sizes.
                axis_fragmentations=None,
                prepend_axis_num=0,
            )


def _describe_wholes(part: ShardedTensor | ShardedTensorFactory, key: str, replica: Shape) -> list[ShardedTensor]:
    """Describe the parameter's tensors in the checkpoint, in the parameter's order, with views of a probe as data.

    A parameter has several if the model fuses tensors that the checkpoint keeps apart: gate and up of an MLP.
    """
    probe = torch.empty(part.data.shape, dtype=torch.float32, device="meta")
    dtype: dict[str, Any] = {} if isinstance(part, ShardedTensorFactory) else {"dtype": torch.float32}
    named = dataclasses.replace(part, key=key, data=probe, replica_id=replica, **dtype)
    wholes = list(nested_values(named.build())) if isinstance(named, ShardedTensorFactory) else [named]
    for whole in wholes:
        is_view = whole.data is probe or whole.data._base is probe
        if not isinstance(whole, ShardedTensor) or not is_view or not whole.data.is_contiguous():
            raise unknown_megatron(
                f"{part.key} must be saved as contiguous parts of the parameter, and is saved otherwise"
            )
    return sorted(wholes, key=lambda whole: whole.data.storage_offset())
