"""Megatron's router with the bias that helps to choose experts as a parameter without gradient.

Megatron's is a buffer: mixed precision would round it, and loads, exports, digests, checkpoints and copies of models
would need a way of their own for it. Invariants:

- the bias is in float32 in models of any precision;
- with --moe-router-bias-update-rate above 0, each update counts the tokens that go to each expert, in the micro-batches
  of all replicas, once for each pass that trains. Padding does not count, nor does a part that is computed again.

Megatron itself changes the bias by the counts when it reduces the update's gradients, and clears them.

Letters: R rows of this rank, X experts.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

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
