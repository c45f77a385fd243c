"""The content of a checkpoint: model, optimizer, schedule and random state as Megatron's sharded state dicts."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_rl.errors import InputError
from megatron_rl.platforms import Platform
from megatron_rl.platforms.megatron_patches import allocate_adam_state
from megatron_rl.shared.weights.shards import Shard
from megatron_rl.trainer.mcore.checkpoint.slices import in_slices
from megatron_rl.trainer.mcore.model.gpt import PackedGPTModel
from megatron_rl.trainer.mcore.model.lora import Adapter
from megatron_rl.trainer.mcore.step.policy import Trainable

RNG = "rng_state"
REFERENCE, CRITIC = "reference.", "critic."
"""The prefixes of other models' names."""
# The bounds of the schedules of a group of parameters.
_BOUNDS = ("max_lr", "min_lr", "start_wd", "end_wd")
# The only form of the distributed optimizer's state that fits every layout, and that both 0.16 and 0.19 read and write.
# Each tensor is whole, under its parameter's name.
CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    # Otherwise the names of experts' states would depend on the number of optimizers.
    "chained_optim_avoid_prefix": True,
}


def name_chunks(chunks: Sequence[PackedGPTModel]) -> list[tuple[str, PackedGPTModel]]:
    """Name the stages as Megatron's own checkpoints do."""
    return [("model" if len(chunks) == 1 else f"model{index}", chunk) for index, chunk in enumerate(chunks)]


def build_model_state(chunks: Sequence[PackedGPTModel], content: Mapping[str, Any]) -> dict[str, Any]:
    """Describe what is trained, the weights or the adapters of a chunk, as shards of the whole model's."""
    return {
        name: describe_adapters(chunk) or chunk.sharded_state_dict(metadata=dict(content))
        for name, chunk in name_chunks(chunks)
    }


def describe_adapters(chunk: PackedGPTModel) -> dict[str, Any]:
    """Describe a chunk's adapters as shards of PEFT's tensors; nothing if it has none."""
    shards = {
        id(shard.parameter): shard
        for module in chunk.modules()
        if isinstance(module, Adapter)
        for shard in module.shards()
    }
    named = ((name, parameter) for name, parameter in chunk.named_parameters() if id(parameter) in shards)
    return {name: _describe_factor(shards[id(parameter)], parameter) for name, parameter in named}


def _describe_factor(shard: Shard, parameter: torch.nn.Parameter) -> ShardedTensor:
    (piece,) = shard.map.pieces
    is_expert = ".experts." in piece.name
    if is_expert:
        # Its tensor-parallel size is 1.
        tensor_rank, tensor_size = 0, 1
        replica = parallel_state.get_expert_data_parallel_rank()
    else:
        tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        tensor_size = parallel_state.get_tensor_model_parallel_world_size()
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    is_divided = getattr(parameter, "tensor_model_parallel", False) and not is_expert
    offsets = [(piece.dim, tensor_rank, tensor_size)] if is_divided else []
    replica_id = (0, 0 if is_divided else tensor_rank, replica)
    return ShardedTensor.from_rank_offsets(shard.parameter_name, parameter, *offsets, replica_id=replica_id)


def build_other_state(prefix: str, chunks: Sequence[PackedGPTModel], content: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the weights of another model, under names next to the policy's."""
    state = {prefix + name: weights for name, weights in build_model_state(chunks, content).items()}
    add_prefix_for_sharding(state, prefix)
    for part in nested_values(state):
        if isinstance(part, ShardedTensor | ShardedTensorFactory) and part.data.is_pinned():
            # A background writer gets no copy of pinned memory, and the reference may move while it writes.
            part.data = part.data.clone()
    return state


def build_optimizer_state(
    policy: Trainable, state: Mapping[str, Any], content: Mapping[str, Any], is_loading: bool, prefix: str = ""
) -> dict[str, Any]:
    """Describe optimizer and schedule. Each rank describes its own slices of the distributed optimizer.

    `state` has the model's description, `build_model_state`, under names with the prefix.
    """
    model = {name: state[prefix + name] for name, _ in name_chunks(policy.chunks)}
    if not is_loading:
        _allocate(policy.optimizer)
    with in_slices(policy.optimizer):
        optimizer = policy.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=dict(content))
    return {f"{prefix}optimizer": optimizer, f"{prefix}opt_param_scheduler": policy.scheduler.state_dict()}


def get_rng_state(platform: Platform) -> dict[str, Any]:
    """Describe the random state of this rank's place in the model, which is the same in all replicas."""
    of_numpy: Any = np.random.get_state()
    version, keys, *rest = of_numpy
    states = {
        "random_rng_state": random.getstate(),
        # Lists and numbers only, because torch.load needs more permissions for arrays than for tensors.
        "np_rng_state": (version, keys.tolist(), *rest),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": platform.rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    shape, offset = _find_place()
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return {RNG: ShardedObject(RNG, [states], shape, offset, replica_id=replica)}


def has_rng_of_layout(found: Mapping[str, Any]) -> bool:
    """Check whether the same number of tensor and pipeline ranks wrote the checkpoint."""
    shape, offset = _find_place()
    return ShardedObject(RNG, None, shape, offset).unique_key in found


def apply_optimizer(policy: Trainable, loaded: dict[str, Any], is_overriding: bool, prefix: str = "") -> None:
    loaded = {name: loaded[prefix + name] for name in ("optimizer", "opt_param_scheduler")}
    optimizer, scheduler = policy.optimizer, policy.scheduler
    bounds = [{key: group[key] for key in _BOUNDS if key in group} for group in optimizer.param_groups]
    if is_overriding:
        _override_bounds(loaded["optimizer"], bounds)
    _place_steps(optimizer, loaded["optimizer"])
    with in_slices(optimizer):
        optimizer.load_state_dict(loaded["optimizer"])
    for inner in _torch_adams(optimizer):
        for values in inner.state.values():
            # The distributed optimizer loads without steps that were not saved, but cannot update.
            values.setdefault("step", torch.tensor(0.0))
    if is_overriding:
        # The loaded groups have the bounds of the save.
        for group, own in zip(optimizer.param_groups, bounds, strict=True):
            group.update(own)
    scheduler.num_steps = 0
    try:
        scheduler.load_state_dict(loaded["opt_param_scheduler"])
    except AssertionError as error:
        raise InputError(
            f"the checkpoint's schedule differs from the flags' ({error}): write --override-opt-param-scheduler to use "
            f"the flags' schedule, or --use-checkpoint-opt-param-scheduler to use the checkpoint's"
        ) from None


def apply_model(
    chunks: Sequence[PackedGPTModel], loaded: Mapping[str, Any], strict: bool = True, prefix: str = ""
) -> None:
    """Give chunks what `build_model_state` describes. The base of adapters, which it leaves out, stays as it is."""
    for name, chunk in name_chunks(chunks):
        has_adapters = any(isinstance(module, Adapter) for module in chunk.modules())
        chunk.load_state_dict(loaded[prefix + name], strict=strict and not has_adapters)


def apply_rng(loaded: dict[str, Any], platform: Platform) -> None:
    (states,) = loaded[RNG]
    random.setstate(states["random_rng_state"])
    np.random.set_state(states["np_rng_state"])
    torch.set_rng_state(states["torch_rng_state"])
    platform.set_rng_state(states["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["rng_tracker_states"])


def _find_place() -> tuple[tuple[int, int], tuple[int, int]]:
    shape = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    return shape, (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )


def _allocate(optimizer: MegatronOptimizer) -> None:
    """Allocate the optimizer's state, which it does not have before its first step, and which a load expects."""
    for inner in _torch_adams(optimizer):
        allocate_adam_state(inner)
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        # TransformerEngine's Adam: Megatron allocates its state before a load, and not before a save.
        if one.init_state_fn is not None and not one.optimizer.state:
            one.init_state_fn(one.optimizer, one.config)


def _override_bounds(loaded: dict[Any, Any], bounds: Sequence[Mapping[str, Any]]) -> None:
    """Give saved groups this run's bounds: from 0.19 on, Megatron also uses bounds to find a saved group."""
    first, *others = bounds
    if any(own != first for own in others):
        return
    for one in loaded.values() if 0 in loaded else [loaded]:
        for group in one.get("optimizer", one)["param_groups"]:
            group.update(first)


def _place_steps(optimizer: MegatronOptimizer, loaded: dict[Any, Any]) -> None:
    """Move the saved count of steps to where this optimizer keeps it: another kind of Adam may have saved it.

    Torch's keeps it with each parameter, and requires one, but Megatron does not save a step of zero. Those of
    TransformerEngine and apex keep it in the groups, which have settings that torch's do not have.
    """
    fused = [one.defaults for one in _inner(optimizer) if "bias_correction" in one.defaults]
    if not fused and not _torch_adams(optimizer):
        return
    for one in loaded.values() if 0 in loaded else [loaded]:
        part = one.get("optimizer", one)
        # The distributed optimizer keeps its state elsewhere, and its steps in the groups.
        groups, state = part["param_groups"], part.get("state")
        steps = [float(group["step"]) for group in groups if "step" in group]
        if state is not None and "common_step" in state:
            steps.append(float(state["common_step"]))
        step = max(steps, default=0.0)
        if fused:
            for group in groups:
                group.update({key: value for key, value in fused[0].items() if key not in group})
                # A count exists from the first step on.
                if step:
                    group["step"] = int(step)
            if state is not None:
                state.pop("common_step", None)
        elif state is not None:
            state.setdefault("common_step", torch.tensor(step))
        else:
            for group in groups:
                group.setdefault("step", step)


def _torch_adams(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    return [one for one in _inner(optimizer) if isinstance(one, torch.optim.Adam | torch.optim.AdamW)]


def _inner(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    inner = [one.optimizer for one in getattr(optimizer, "chained_optimizers", [optimizer])]
    return [one for one in inner if one is not None]
