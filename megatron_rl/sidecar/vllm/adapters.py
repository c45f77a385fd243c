"""The adapters that a worker samples with: put into vLLM's slot, and read back from its layers.

A layer holds the factors of its modules in tensors with a slot for each set of adapters. Invariants:

- a worker holds the adapters of one version at most, on a base that was proved to be theirs;
- after a load, what lies in the slot is digested: each part of a factor that this worker has, in the dtype that the
  factor came in. All else in the layers' tensors is zero;
- once a worker holds adapters, a step of a request that names others, or none, ends the engine: no token comes from it.

Letters: O outputs, I inputs, K the adapters' rank.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_rl.errors import MegatronRLError
from megatron_rl.shared.weights.fingerprint import DTYPES, digest_each
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.sidecar.vllm.answers import is_sum
from megatron_rl.sidecar.vllm.held import LoadProof, NotHeld, Rectangle
from megatron_rl.sidecar.vllm.received import (
    Refusal,
)

_MERGED = "write --publish-lora merged"
# vLLM's layers whose tensors are read back, by the factor that workers divide.
_DIVIDES_B = ("ColumnParallelLinearWithLoRA", "MergedColumnParallelLinearWithLoRA", "MergedQKVParallelLinearWithLoRA")
_DIVIDES_A = ("RowParallelLinearWithLoRA",)
_WHOLE = ("ReplicatedLinearWithLoRA", "QKVParallelLinearWithLoRA")


class OtherAdapters(MegatronRLError):
    """A step with other adapters than those that the worker holds."""


@dataclasses.dataclass(frozen=True)
class HeldFactor:
    """The part of a factor that this worker holds in its slot."""

    spec: TensorSpec
    values: torch.Tensor
    first_row: int
    first_column: int

    @property
    def is_comparable(self) -> bool:
        """True if the slot holds every number of the factor's dtype."""
        given = DTYPES[self.spec.dtype]
        return torch.promote_types(given, self.values.dtype) == self.values.dtype

    @property
    def rectangle(self) -> Rectangle:
        """The part of the factor that it is."""
        return Rectangle(self.first_row, self.first_column, *self.values.shape)


class AdapterSlot:
    """The slot of one worker's model runner."""

    def __init__(self, runner: Any) -> None:
        manager = getattr(runner, "lora_manager", None)
        if manager is None:
            raise Refusal(
                "the engine has no slot for adapters: start it with --rollout-lora-rank and the adapters' rank, or "
                f"{_MERGED}"
            )
        self.number = 0
        """The number under which requests name the adapters that it holds; 0 if it holds none."""
        self._manager = manager._adapter_manager
        # The places of factors that were found: vLLM's layers stay the same.
        self._places: dict[str, tuple[Any, int, bool]] = {}
        self._guard(runner)

    def clear(self) -> None:
        """Hold no adapters."""
        self.number = 0
        self._manager.remove_all_adapters()

    def wipe(self) -> None:
        """Hold no adapters, whatever the layers' tensors hold."""
        self.clear()
        for layer in self._manager.modules.values():
            for stack in _list_stacks(layer):
                stack.zero_()

    def put(self, number: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Hold these factors, whose scale is in B, in place of others."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        self.clear()
        name, factor = next(iter(tensors.items()))
        _, _, is_a = self._find_place(name)
        rank = factor.shape[0 if is_a else 1]
        if rank > (most := self._manager.lora_config.max_lora_rank):
            raise Refusal(
                f"the adapters have rank {rank}, and the engine takes {most}: write --rollout-lora-rank {rank}"
            )
        for name in tensors:
            self._find_place(name)
        # vLLM keeps these tensors; those that came are overwritten by a later publish.
        own = {name: tensor.clone() for name, tensor in tensors.items()}
        model = LoRAModel.from_lora_tensors(
            number,
            own,
            PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
            device="cpu",
            dtype=self._manager.lora_config.lora_dtype,
            weights_mapper=self._find_renaming(),
        )
        self._manager.add_adapter(model)
        self._manager.activate_adapter(number)
        self.number = number

    def prove(self, specs: Sequence[TensorSpec], digests: Mapping[str, Sequence[int]]) -> LoadProof:
        """Compare what lies in the slot with the digests of the factors that came; raise NotHeld if they differ."""
        held = [self._read(spec) for spec in specs]
        self._must_hold_nothing_else(held)
        compared = [one for one in held if one.is_comparable]
        lines = _digest_each(compared).tolist()
        wrong, proved, shares = [], set(), {}
        for one, lanes in zip(compared, lines, strict=True):
            if one.values.numel() < one.spec.num_elements:
                shares[one.spec.name] = [(one.rectangle, tuple(lanes))]
            elif is_sum([lanes], digests[one.spec.name]):
                proved.add(one.spec.name)
            else:
                wrong.append(one.spec.name)
        if wrong:
            raise NotHeld(
                f"{len(wrong)} factors of adapters do not hold the numbers that were given: {', '.join(wrong[:5])}",
                wrong,
            )
        uncompared = tuple(one.spec.name for one in held if not one.is_comparable)
        return LoadProof(len(compared), len(held), uncompared, shares, (), frozenset(proved))

    def _must_hold_nothing_else(self, held: Sequence[HeldFactor]) -> None:
        """Raise NotHeld unless all numbers of the layers' tensors but those of these factors are zero."""
        sizes = {one.values.data_ptr(): one.values.numel() for one in held}
        stacks = [stack for layer in self._manager.modules.values() for stack in _list_stacks(layer)]
        # A tensor that a factor fills has room for nothing else.
        filled = {stack.data_ptr() for stack in stacks if sizes.get(stack.data_ptr()) == stack.numel()}
        other_stacks = [stack for stack in stacks if stack.data_ptr() not in filled]
        others = [one.values for one in held if one.values.data_ptr() not in filled]
        if _count_nonzero(other_stacks) != _count_nonzero(others):
            raise NotHeld("the layers hold other adapters too, or more rows of these")

    def _read(self, spec: TensorSpec) -> HeldFactor:
        layer, index, is_a = self._find_place(spec.name)
        slot = self._manager.lora_index_to_id.index(self.number)
        stacks = layer.lora_a_stacked if is_a else layer.lora_b_stacked
        rank = spec.shape[0 if is_a else 1]
        values = stacks[index][slot, 0]
        first_row, first_column = _find_origin(layer, index, is_a)
        return HeldFactor(spec, values[:rank] if is_a else values[:, :rank], first_row, first_column)

    def _find_place(self, name: str) -> tuple[Any, int, bool]:
        """Return the layer of a factor, the index of its module in the layer, and True for A."""
        if name not in self._places:
            self._places[name] = self._search_place(name)
        return self._places[name]

    def _search_place(self, name: str) -> tuple[Any, int, bool]:
        from vllm.lora.utils import parse_fine_tuned_lora_name

        module, is_a = parse_fine_tuned_lora_name(name, self._find_renaming())
        for layer_name, index in ((module, 0), *self._find_packed(module)):
            layer = self._manager.modules.get(layer_name)
            if layer is not None and _is_read(layer):
                return layer, index, is_a
        raise Refusal(f"the engine's vLLM has no slot for adapters of {module} here: leave it out, or {_MERGED}")

    def _find_packed(self, module: str) -> Iterator[tuple[str, int]]:
        for name, modules in self._manager.packed_modules.items():
            if module in modules:
                yield name, modules.index(module)

    def _find_renaming(self) -> Any:
        """Return vLLM's renaming of modules, as its own loader of adapters does."""
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        return None if mapper is None else mapper.get_rename_mapper()

    def _guard(self, runner: Any) -> None:
        """Have the runner refuse a step with other adapters than these."""
        activate: Callable[..., Any] = runner._set_active_loras

        def activate_checked(prompts: Sequence[int], tokens: Sequence[int], *rest: Any, **others: Any) -> Any:
            named = {int(number) for number in set(tokens)}
            if self.number and named - {self.number}:
                raise OtherAdapters(
                    f"a request names adapters {sorted(named)}, of which 0 is the base alone, and the worker holds "
                    f"{self.number}"
                )
            return activate(prompts, tokens, *rest, **others)

        runner._set_active_loras = activate_checked


def _digest_each(held: Sequence[HeldFactor]) -> torch.Tensor:
    """Digest factors in the dtype in which they came; a number that this dtype would round changes the digest."""
    given = [one.values.to(DTYPES[one.spec.dtype]) for one in held]
    lanes = digest_each([(some, one.first_row, one.first_column) for some, one in zip(given, held, strict=True)])
    for some, one, lanes_of_one in zip(given, held, lanes, strict=True):
        if some.dtype != one.values.dtype:
            lanes_of_one += (some.to(one.values.dtype) != one.values).sum()
    return lanes


def _is_read(layer: Any) -> bool:
    """Check whether it is known which part of each factor the layer holds."""
    kind = type(layer).__name__
    is_joined = getattr(layer, "is_merged_col_linear", False) and layer.n_slices == 1
    if layer.tp_size > 1 and (is_joined or kind == "QKVParallelLinearWithLoRA"):
        return False
    return kind in (*_DIVIDES_A, *_DIVIDES_B, *_WHOLE)


def _find_origin(layer: Any, index: int, is_a: bool) -> tuple[int, int]:
    """Return the row and column of a factor at which this worker's part begins."""
    kind = type(layer).__name__
    if kind in _DIVIDES_A and is_a:
        return 0, layer.tp_rank * layer.input_size
    if kind in _DIVIDES_B and not is_a:
        number = layer.output_ids[index] if hasattr(layer, "output_ids") else layer.tp_rank
        return number * layer.lora_b_stacked[index].shape[2], 0
    return 0, 0


def _count_nonzero(tensors: Sequence[torch.Tensor]) -> int:
    return int(torch.stack([tensor.count_nonzero() for tensor in tensors]).sum()) if tensors else 0


def _list_stacks(layer: Any) -> list[torch.Tensor]:
    return [
        stack
        for name, stacks in vars(layer).items()
        if name.endswith("_stacked")
        for stack in (stacks if isinstance(stacks, tuple | list) else (stacks,))
        if isinstance(stack, torch.Tensor)
    ]
