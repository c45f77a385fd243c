"""Megatron's router, with three differences, and its experts with biases.

The bias that helps to choose experts is a parameter without gradient. Megatron's is a buffer: mixed precision would
round it, and loads, exports, digests, checkpoints and copies of models would need a way of their own for it.
Invariants:

- the bias is in float32 in models of any precision;
- with --moe-router-bias-update-rate above 0, each update counts the tokens that go to each expert, in the micro-batches
  of all replicas, once for each pass that trains. Padding does not count, nor does a part that is computed again.

Megatron itself changes the bias by the counts when it reduces the update's gradients, and clears them.

Where experts have groups and softmax scores, groups are compared by their largest scores, as in engines and
transformers. Megatron compares them by sums of several.

The chosen experts of a token are in the order of their scores in every pass. Megatron-core from 0.18 on sorts them only
in passes with gradients. The sum by which their weights are normalized then differs in its last bits, and so would a
frozen role of equal weights from the policy.

Letters: R rows of this rank, X experts, G groups of them, K experts of a token.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.moe.router import TopKRouter

from megatron_rl.platforms.megatron_patches import replaced
from megatron_rl.trainer.data.packing import Pack


class BiasedRouter(TopKRouter):
    """Megatron's router whose bias is a parameter that gets no gradient."""

    num_counted: int | None = None
    """The number of this rank's first rows that count in the pass that is running; None outside of one."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Change the parameters, as to another dtype or device; the bias keeps its dtype."""
        bias = self.expert_bias

        def changed(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            return tensor.to(result.device) if tensor is bias and result.dtype != tensor.dtype else result

        return super()._apply(changed, recurse)

    def _apply_expert_bias(self, routing_map: torch.Tensor, *_: Any, **__: Any) -> None:
        """Count tokens of [R, X], where Megatron would count padding too."""
        if self.num_counted is not None:
            with torch.no_grad():
                self.local_tokens_per_expert += routing_map[: self.num_counted].sum(dim=0)


def freeze_router_biases(chunk: torch.nn.Module) -> None:
    """Make the biases of the chunk's routers parameters without gradient."""
    for module in chunk.modules():
        if isinstance(module, TopKRouter) and isinstance(module._buffers.get("expert_bias"), torch.Tensor):
            bias = module._buffers.pop("expert_bias")
            assert bias is not None
            kind = type(module)
            # A recipe's own router keeps its changes, which apply between our class and Megatron's.
            own = BiasedRouter if kind is TopKRouter else type(f"Biased{kind.__name__}", (BiasedRouter, kind), {})
            module.__class__ = own
            module.register_parameter("expert_bias", torch.nn.Parameter(bias.float(), requires_grad=False))


Choose = Callable[[torch.Tensor, int, int | None, int | None], tuple[torch.Tensor, torch.Tensor]]
"""A function of scores [R, X], K, the number of groups and that of chosen groups.

It returns the chosen scores and the experts' numbers, [R, K] both.
"""


class ChoosingRouter(TopKRouter):
    """Megatron's router with another choice of experts."""

    router_replay: Any
    choose: Choose

    def routing(self, *args: Any, **keywords: Any) -> Any:
        """Choose the experts of tokens, through the switch with which megatron-core replays routing."""
        with replaced(self, "router_replay", ExpertChoice(self.router_replay, self.choose)):
            return super().routing(*args, **keywords)


class ExpertChoice:
    """A choice of experts at the place of megatron-core's replay; a replay takes it for the router's own."""

    def __init__(self, replay: Any, choose: Choose) -> None:
        self._replay = replay
        self._choose = choose

    def get_replay_topk(
        self, scores_RX: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, _: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._replay is None:
            return self._choose(scores_RX, topk, num_groups, group_topk)
        return self._replay.get_replay_topk(scores_RX, topk, num_groups, group_topk, self._choose)


def choose_from_groups(
    scores_RX: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest scores in the groups that have the largest ones."""
    assert num_groups is not None and group_topk is not None
    scores_RGX = scores_RX.unflatten(1, (num_groups, -1))
    groups_RG = scores_RGX.amax(dim=2).topk(group_topk, dim=1).indices
    is_active_RG1 = torch.zeros_like(scores_RGX[..., :1], dtype=torch.bool).scatter_(1, groups_RG[..., None], True)
    return scores_RGX.masked_fill(~is_active_RG1, -torch.inf).flatten(1).topk(topk, dim=1)


def choose_in_order(scores_RX: torch.Tensor, topk: int, *_: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest scores, the largest first."""
    return torch.topk(scores_RX, topk, dim=1)


def settle_choices(chunk: torch.nn.Module) -> None:
    """Have the chunk's routers compare groups of experts as engines do, and choose in the same order in every pass."""
    routers: list[Any] = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
    for router in routers:
        kind = type(router)
        choose: Choose | None = None
        # A recipe's own router keeps its choice.
        if router.config.moe_router_group_topk:
            # Megatron's own choice from groups, which sigmoid scores keep, is in order.
            if kind is TopKRouter and router.score_function == "softmax":
                choose = choose_from_groups
        elif kind in (TopKRouter, BiasedRouter) and hasattr(router, "router_replay"):
            choose = choose_in_order
        if choose is not None:
            router.__class__ = type(f"Choosing{kind.__name__}", (ChoosingRouter, kind), {})
            router.choose = choose


def select_rows(chunk: Any, rows: slice) -> slice:
    """Return the rows of the pack that this rank's routers have, of those of its context-parallel part."""
    if not chunk.config.sequence_parallel:
        return rows
    length = (rows.stop - rows.start) // chunk.pg_collection.tp.size()
    first = rows.start + chunk.pg_collection.tp.rank() * length
    return slice(first, first + length)


def count_tokens(pack: Pack, rows: slice) -> int:
    """Count the rows among these that are not padding; they are the first."""
    return min(max(pack.num_tokens - pack.num_padding - rows.start, 0), rows.stop - rows.start)


@contextlib.contextmanager
def counting(chunk: Any, pack: Pack, rows: slice) -> Iterator[None]:
    """Count the tokens of a pass that trains, of which this context-parallel rank has these rows."""
    config = chunk.config
    has_rate = config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate
    if not has_rate or not chunk.training or not torch.is_grad_enabled():
        yield
        return
    num_counted = count_tokens(pack, select_rows(chunk, rows))
    routers = [module for module in chunk.modules() if isinstance(module, BiasedRouter)]
    for router in routers:
        router.num_counted = num_counted
    try:
        yield
    finally:
        for router in routers:
            router.num_counted = None


class _FreshOutput(RowParallelLinear):
    """Megatron's layer whose output is a tensor of its own.

    Megatron adds the weighted bias of an expert in place, which autograd forbids for what this layer otherwise returns.
    """

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(*args, **kwargs)
        return output.clone(), bias


def settle_expert_biases(chunk: torch.nn.Module) -> None:
    """Have the biases of experts' second layers added and reduced as those of experts must be.

    By the mark of sequence parallelism, Megatron would sum the gradient of a bias over tensor-parallel ranks. These
    have other experts, or copies whose gradients are already summed.
    """
    for name, module in chunk.named_modules():
        if ".local_experts." in name and type(module) is RowParallelLinear and module.bias is not None:
            module.__class__ = _FreshOutput
            setattr(module.bias, "sequence_parallel", False)  # noqa: B010
