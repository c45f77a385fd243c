"""Low-rank adapters on Megatron's linear layers, and the roles that share one frozen base.

Each adapted layer has an `Adapter`, whose products are added to the layer's output. Invariants:

- base weights get no gradient and never change; a merge is a new tensor;
- with B = 0, as at the start, outputs equal the base's to the last bit;
- the reference is the base: the same parameters, with adapters off. The old policy has copies of the adapters alone.

How gradients of the factors are summed over tensor-parallel ranks follows from the layer. If ranks divide outputs,
the narrow rows are the same on all of them, and their gradients are summed in the backward pass. If ranks divide
inputs, the narrow rows are sums over ranks. With sequence parallelism, the undivided factor sees a rank's rows only, so
its gradient has Megatron's mark to be summed.

Megatron's own layers get the rows that they multiply. TransformerEngine's may normalize their rows first, or multiply
the rows of several experts, each with a weight of its own. They are recognized by the names of megatron-core's classes
for them, because the package may not be installed.

Letters: R rows, I inputs of this rank, O its outputs, K the adapter's rank times the layer's modules.
"""

import dataclasses
import enum
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from megatron_rl.config.settings import Settings
from megatron_rl.errors import InputError
from megatron_rl.platforms.megatron_patches import replaced
from megatron_rl.shared.weights.adapters import AdapterMapping, AdapterPart
from megatron_rl.shared.weights.mapping import Coordinates, Mapping
from megatron_rl.shared.weights.shards import Shard
from megatron_rl.trainer.mcore.model.gpt import ADAPTER, PackedGPTModel, named_places


class Role(enum.Enum):
    """The role in which a model with adapters computes."""

    POLICY = "with the adapters that are trained"
    OLD = "with the adapters of an earlier version"
    REFERENCE = "without adapters"


class RoleSwitch:
    """The role of the pass that is running, for all adapters of a model."""

    role = Role.POLICY


_NORMALIZES = "TELayerNormColumnParallelLinear"
_PLAIN = ("TEColumnParallelLinear", "TERowParallelLinear", _NORMALIZES)
_GROUPED = ("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear")
"""Layers that multiply the rows of several experts, each with a weight of its own."""


class Adapter(torch.nn.Module):
    """The adapters of one weight of a linear layer: one for each module that the weight consists of."""

    def __init__(
        self,
        weight: torch.nn.Parameter,
        group: Any,
        is_sequence_parallel: bool,
        parts: Sequence[AdapterPart],
        scale: float,
        switch: RoleSwitch,
    ):
        """Make it, unfilled; `group` are the tensor-parallel ranks that divide the layer."""
        super().__init__()
        self.parts = list(parts)
        self._scale = scale
        self._switch = switch
        self._group = group
        self._is_sequence_parallel = is_sequence_parallel
        # An expert's ranks share nothing: its tensor-parallel size is 1.
        self._is_divided = not parts[0].is_expert
        self._splits_inputs = parts[0].splits_inputs
        self._kept: list[torch.Tensor] = []
        for number, part in enumerate(parts):
            for name, shape in ((f"a{number}", part.a.shape), (f"b{number}", part.b.shape)):
                factor = torch.nn.Parameter(torch.empty(shape, dtype=weight.dtype, device=weight.device))
                self.register_parameter(name, factor)
                self._mark(factor, name[0] == "a", getattr(weight, "allreduce", True))
        rows = [row for part in parts for row in part.rows]
        # The row of the joined B that each output has; outputs of modules without an adapter have a row of zeros.
        order_O = torch.full((len(weight),), len(rows), device="cpu")
        order_O[rows] = torch.arange(len(rows), device="cpu")
        is_plain = len(parts) == 1 and rows == list(range(len(weight)))
        self._order_O = None if is_plain else order_O.to(weight.device)

    def _mark(self, factor: torch.nn.Parameter, is_a: bool, is_reduced: bool) -> None:
        """Set the marks by which Megatron reduces the factor's gradient and counts it in the norm."""
        is_divided = not self._is_divided or is_a is self._splits_inputs
        marks: dict[str, Any] = {"allreduce": is_reduced}
        if is_divided:
            marks |= {"tensor_model_parallel": True, "partition_dim": 1 if is_a else 0, "partition_stride": 1}
        elif self._is_sequence_parallel:
            marks["sequence_parallel"] = True
        for mark, value in marks.items():
            setattr(factor, mark, value)
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(factor)

    def shards(self) -> list[Shard]:
        """Return the factors with their places in PEFT's tensors."""
        places = [place for part in self.parts for place in (part.a, part.b)]
        return [Shard(place.pieces[0].name, factor, place) for place, factor in zip(places, self._own(), strict=True)]

    @torch.no_grad()
    def keep(self) -> None:
        """Keep a copy of the factors for the old policy."""
        if not self._kept:
            self._kept = [torch.empty_like(factor) for factor in self._own()]
        for copy, factor in zip(self._kept, self._own(), strict=True):
            copy.copy_(factor)

    @torch.no_grad()
    def merge(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """Return the weight with the adapters in it, in float32 at least; the weight stays as it is."""
        wide = torch.promote_types(weight_OI.dtype, torch.float32)
        a_KI, b_OK = (factor.to(wide) for factor in self._join(self._own()))
        return torch.addmm(weight_OI.to(wide), b_OK, a_KI, alpha=self._scale)

    def forward(self, rows_RI: torch.Tensor, output_RO: torch.Tensor) -> torch.Tensor:
        """Add the adapters' products to the output of the layer; both may have more dimensions before the last."""
        role = self._switch.role
        if role is Role.REFERENCE:
            return output_RO
        assert role is Role.POLICY or self._kept, "the old policy's adapters are kept before an update"
        a_KI, b_OK = self._join(self._kept if role is Role.OLD else self._own())
        narrow_RK = torch.nn.functional.linear(rows_RI, a_KI)
        if self._is_divided:
            narrow_RK = self._exchange(narrow_RK)
        total = torch.addmm(output_RO.flatten(0, -2), narrow_RK.flatten(0, -2), b_OK.t(), alpha=self._scale)
        return total.view(output_RO.shape)

    def _exchange(self, narrow_RK: torch.Tensor) -> torch.Tensor:
        """Bring the narrow rows to where the layer's outputs are computed, as Megatron does with the layer's rows."""
        if self._splits_inputs and self._is_sequence_parallel:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(narrow_RK, group=self._group)
        if self._splits_inputs:
            return tensor_parallel.reduce_from_tensor_model_parallel_region(narrow_RK, group=self._group)
        if self._is_sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(
                narrow_RK, tensor_parallel_output_grad=True, group=self._group
            )
        return tensor_parallel.copy_to_tensor_model_parallel_region(narrow_RK, group=self._group)

    def _own(self) -> list[torch.Tensor]:
        """Return A and B of each module, in order."""
        return list(self.parameters(recurse=False))

    def _join(self, factors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one A and one B for all modules: each module's rows of B meet its own rows of A only."""
        if self._order_O is None:
            return factors[0], factors[1]
        a_KI, b_SK = torch.cat(list(factors[0::2])), torch.block_diag(*factors[1::2])
        rows_SK = torch.cat([b_SK, b_SK.new_zeros(1, b_SK.shape[1])])
        return a_KI, rows_SK.index_select(0, self._order_O)


class ExpertAdapters(torch.nn.ModuleList):
    """The adapters of a layer that multiplies the rows of several experts, in the order of its weights."""

    def forward(self, rows_RI: torch.Tensor, output_RO: torch.Tensor, num_rows: Sequence[int]) -> torch.Tensor:
        """Add each expert's products to its rows of the output; `num_rows` are the rows of each expert."""
        sizes = [int(count) for count in num_rows]
        parts = zip(self, rows_RI.split(sizes), output_RO.split(sizes), strict=True)
        return torch.cat([adapter(rows, output) for adapter, rows, output in parts])


class RolePass(torch.nn.Module):
    """A chunk of the policy's model in another role, without gradients, at the place of a frozen model's chunk."""

    def __init__(self, chunk: torch.nn.Module, switch: RoleSwitch, role: Role):
        super().__init__()
        self.module = chunk
        self._switch = switch
        self._role = role

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute as the chunk does, in the role."""
        was_training = self.module.training
        self.module.eval()
        try:
            with replaced(self._switch, "role", self._role), torch.no_grad():
                return self.module(*args, **kwargs)  # type: ignore[no-any-return]
        finally:
            self.module.train(was_training)


class Adapters:
    """The adapters of this rank's chunks."""

    def __init__(
        self, chunks: Sequence[PackedGPTModel], mapping: AdapterMapping, coordinates: Coordinates, alpha: float
    ):
        """Freeze the chunks and give their layers adapters, which are not filled yet."""
        self.mapping = mapping
        self.alpha = alpha
        self._switch = RoleSwitch()
        self.by_parameter: dict[str, Adapter] = {}
        """The adapter of each adapted weight, by the weight's name in the whole model."""
        for chunk in chunks:
            chunk.requires_grad_(False)
        for chunk, name, global_name in list(named_places(chunks)):
            path, _, own_name = name.rpartition(".")
            parts = mapping.place(global_name, coordinates, chunk.vocab_size) if own_name.startswith("weight") else []
            if parts:
                layer = chunk.get_submodule(path)
                group, weight = find_group(layer, parts[0].is_expert, global_name), getattr(layer, own_name)
                scale = alpha / mapping.rank
                adapter = Adapter(weight, group, layer.sequence_parallel, parts, scale, self._switch)
                self.by_parameter[global_name] = adapter
                _attach(layer, adapter)

    @property
    def shards(self) -> list[Shard]:
        return [shard for adapter in self.by_parameter.values() for shard in adapter.shards()]

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Draw A and clear B as PEFT does; the numbers depend on seed and module alone."""
        shapes = {spec.name: spec.shape for spec in self.mapping.manifest("float32")}
        for shard in self.shards:
            (piece,) = shard.map.pieces
            if piece.name.endswith(".lora_B.weight"):
                shard.parameter.zero_()
                continue
            digest = hashlib.sha256(f"{seed} {piece.name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            whole = torch.empty(shapes[piece.name], dtype=torch.float32, device="cpu")
            torch.nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
            shard.parameter.copy_(whole.narrow(piece.dim, piece.source, piece.length))

    def play(self, chunks: Sequence[torch.nn.Module], role: Role) -> list[torch.nn.Module]:
        """Return the policy's chunks in another role."""
        return [RolePass(chunk, self._switch, role) for chunk in chunks]

    def keep(self) -> None:
        """Keep a copy of all adapters for the old policy."""
        for adapter in self.by_parameter.values():
            adapter.keep()

    def are_zero(self) -> bool:
        """Check whether this rank's adapters change nothing, because B is zero in all of them."""
        ends = [shard.parameter for shard in self.shards if shard.parameter_name.endswith(".lora_B.weight")]
        return not any(bool(b.detach().count_nonzero()) for b in ends)


def attach_adapters(settings: Settings, chunks: Sequence[PackedGPTModel], coordinates: Coordinates) -> Adapters:
    """Freeze chunks and give them the adapters of --lora-rank and --lora-targets, which are not filled yet."""
    lora = settings.lora
    mapping = AdapterMapping(Mapping(settings.architecture), lora.rank, lora.targets)
    return Adapters(chunks, mapping, coordinates, lora.used_alpha)


def _attach(layer: Any, adapter: Adapter) -> None:
    """Have a layer add the adapter's products; a layer with several weights gets the products of each in order."""
    if type(layer).__name__ not in _GROUPED:
        layer.register_module(ADAPTER, adapter)
        layer.register_forward_hook(_add_adapter)
    elif hasattr(layer, ADAPTER):
        layer.adapter.append(adapter)
    else:
        layer.register_module(ADAPTER, ExpertAdapters([adapter]))
        layer.register_forward_hook(_add_adapter)


def _add_adapter(layer: Any, arguments: tuple[Any, ...], outputs: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    """Add the adapter's products to what a layer has computed from its first argument."""
    rows, *rest = arguments
    output, bias = outputs
    return layer.adapter(find_multiplied_rows(layer, rows), output, *rest), bias


def list_scaled(adapters: Adapters) -> list[Shard]:
    """Return this rank's factors as engines get them: with alpha over rank in B, so that a product needs no scale."""
    scale = adapters.alpha / adapters.mapping.rank

    def multiply(factor: torch.Tensor) -> torch.Tensor:
        return factor.to(torch.promote_types(factor.dtype, torch.float32)) * scale

    return [
        dataclasses.replace(shard, compute=multiply) if shard.parameter_name.endswith(".lora_B.weight") else shard
        for shard in adapters.shards
    ]


def find_group(layer: Any, is_expert: bool, name: str) -> Any:
    """Return the tensor-parallel ranks that divide a layer.

    Raise an InputError unless the layer is one that the sums over ranks are written for.
    """
    kind = type(layer).__name__
    is_engines = kind in (*_PLAIN, *_GROUPED)
    if not is_engines and not isinstance(layer, ColumnParallelLinear | RowParallelLinear):
        raise InputError(
            f"--lora-targets: {name} belongs to a {kind}, which cannot have an adapter yet: write "
            f"--transformer-impl local, or name other modules"
        )
    if is_expert and (size := layer.config.expert_tensor_parallel_size) > 1:
        raise InputError(
            f"--lora-targets: {name} is divided over {size} ranks, and experts with adapters cannot be: write "
            f"--expert-tensor-parallel-size 1"
        )
    # Megatron takes the exchange of rows out of the layers of a shared expert.
    overlaps = layer.parallel_mode is None if is_engines else layer.explicit_expert_comm
    if not is_expert and overlaps:
        raise InputError(
            f"--lora-targets: {name} overlaps the exchange of tokens, and cannot with an adapter: drop "
            f"--moe-shared-expert-overlap"
        )
    if getattr(layer, "gather_output", False) or not getattr(layer, "input_is_parallel", True):
        raise InputError(f"--lora-targets: {name} exchanges its rows in a way that adapters do not: name other modules")
    return layer._tp_group if is_engines else layer.tp_group


def find_multiplied_rows(layer: Any, rows_RI: torch.Tensor) -> torch.Tensor:
    """Return the rows that the layer's weight multiplies, given those that the layer takes."""
    if type(layer).__name__ != _NORMALIZES:
        return rows_RI
    config, weight_I = layer.config, layer.layer_norm_weight
    shape, epsilon = rows_RI.shape[-1:], config.layernorm_epsilon
    weight_I = weight_I + 1 if config.layernorm_zero_centered_gamma else weight_I
    if config.normalization == "RMSNorm":
        return torch.nn.functional.rms_norm(rows_RI, shape, weight_I, epsilon)
    return torch.nn.functional.layer_norm(rows_RI, shape, weight_I, layer.layer_norm_bias, epsilon)
