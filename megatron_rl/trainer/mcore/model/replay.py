"""Replay of routing: a model's routers take given experts, through megatron-core's own switch.

Engines chose these for a pack, or another model's routers did while they were recorded.

A router of megatron-core that has a `router_replay` asks it for the experts of its tokens. megatron-core's own holds
them for one pass of all routers. This one takes them from the pack that its layer computes. Invariants:

- a token whose experts are known goes to these, weighted by the router's own scores, through which gradients flow;
- the router chooses the experts of any other token: padding, and the last token of a response;
- what is computed again in the backward pass goes to the experts of the forward pass: a layer, or its experts alone.
  The backward passes of a chunk come in the order of its forward passes.

Letters: R rows of this rank's routers, L layers of the model, K experts of a token, X experts.
"""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

from megatron_rl.trainer.data.packing import Pack
from megatron_rl.trainer.data.routing import Routing
from megatron_rl.trainer.mcore.model import context
from megatron_rl.trainer.mcore.model.attention import PackParams
from megatron_rl.trainer.mcore.model.router import count_tokens, select_rows


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of a layer that is running."""

    routing: Routing | None
    is_trained: bool
    """True in a pass with gradients, or in a layer that is computed again for them."""


class RouterReplay:
    """The replay of one router, at the place of megatron-core's class of that name."""

    def __init__(self, layer: int) -> None:
        """Replay the router of a layer, counted from zero over all layers."""
        self.layer = layer
        self.recorded: list[torch.Tensor] | None = None
        """The experts [R, K] of each pass while a record is made; None at other times."""
        self._call: _Call | None = None
        # The routing of calls whose experts alone are computed again, the earliest first.
        self._kept: collections.deque[Routing | None] = collections.deque()
        self._counted: list[torch.Tensor] = []

    def begin(self, call: _Call) -> None:
        self._call = call

    def end(self) -> None:
        self._call = None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of the experts of tokens with scores [R, X], and the experts' numbers, [R, K] both."""
        assert default_compute_topk is not None
        own_RK, own_experts_RK = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        routing = self._find_routing()
        if self.recorded is not None:
            self.recorded.append(own_experts_RK)
        if routing is None:
            return own_RK, own_experts_RK
        known_R1 = routing.is_known_T[:, None]
        experts_RK = torch.where(known_R1, routing.experts_TLK[:, self.layer].long(), own_experts_RK)
        if self._call is not None and self._call.is_trained:
            self._count(own_experts_RK, experts_RK, routing.is_known_T)
        return scores.gather(1, experts_RK), experts_RK

    def take_counts(self) -> tuple[int, int]:
        """Return and clear the experts that tokens were sent to in passes that train, and those among them that the
        router would not have chosen.
        """
        counted, self._counted = self._counted, []
        num_replayed, num_changed = torch.stack(counted).sum(dim=0).tolist() if counted else (0, 0)
        return num_replayed, num_changed

    def _find_routing(self) -> Routing | None:
        if self._call is None:
            # The experts alone are computed again.
            return self._kept.popleft() if self._kept else None
        if self._call.is_trained and not torch.is_grad_enabled():
            self._kept.append(self._call.routing)
        return self._call.routing

    def _count(self, own_RK: torch.Tensor, experts_RK: torch.Tensor, is_known_R: torch.Tensor) -> None:
        is_own_RK = (experts_RK[:, :, None] == own_RK[:, None, :]).any(dim=2)
        num_replayed = is_known_R.sum() * experts_RK.shape[1]
        # Tokens whose experts are not known have their own.
        self._counted.append(torch.stack([num_replayed, (~is_own_RK).sum()]))


class RoutingRecord:
    """The experts that the old policy's routers chose for slots, which the policy's routers take.

    Each is this rank's, of the rows that its routers have. It is recorded once and taken once.
    """

    def __init__(self) -> None:
        # By slot and chunk.
        self._routing: dict[tuple[int, int], Routing] = {}

    @contextlib.contextmanager
    def record(self, slot: int, chunk: Any, pack: Pack) -> Iterator[None]:
        """Record the pass of a slot's pack through a chunk of the old policy, within the context."""
        replays = [layer.mlp.router.router_replay for layer in _list_layers(chunk)]
        for replay in replays:
            replay.recorded = []
        try:
            yield
            key = (slot, chunk.vp_stage or 0)
            assert key not in self._routing, "a slot passes each chunk of the old policy once"
            self._routing[key] = _join_layers(chunk, pack, replays)
        finally:
            for replay in replays:
                replay.recorded = None

    def take(self, slot: int, chunk: Any) -> Routing:
        """Return and forget the experts for a slot's pass through the same chunk of the policy."""
        return self._routing.pop((slot, chunk.vp_stage or 0))


def _join_layers(chunk: Any, pack: Pack, replays: Sequence[RouterReplay]) -> Routing:
    architecture = chunk.architecture
    rows = select_rows(chunk, context.own_rows(pack.num_tokens, chunk.pg_collection.cp))
    shape = (rows.stop - rows.start, architecture.num_layers, architecture.experts.num_active)
    device = pack.tokens_T.device
    experts_TLK = torch.zeros(shape, dtype=torch.int16, device=device)
    for replay in replays:
        assert replay.recorded is not None
        (experts_RK,) = replay.recorded
        experts_TLK[:, replay.layer] = experts_RK
    # Routers choose the experts of padding, which counts nowhere.
    return Routing(experts_TLK, torch.arange(shape[0], device=device) < count_tokens(pack, rows))


def replay_routing(chunks: Iterable[torch.nn.Module]) -> None:
    """Have the routers of these chunks replay the routing that is given with packs, and record their choice."""
    for chunk in chunks:
        for layer in _list_layers(chunk):
            replay = layer.mlp.router.router_replay = RouterReplay(layer.layer_number - 1)
            layer.register_forward_pre_hook(functools.partial(_begin, replay), with_kwargs=True)
            layer.register_forward_hook(lambda *_, replay=replay: replay.end(), always_call=True)


def take_counts(chunks: Sequence[torch.nn.Module]) -> dict[str, float]:
    """Return and clear this rank's counts of replayed experts; nothing if no router has replayed any."""
    replays = [layer.mlp.router.router_replay for chunk in chunks for layer in _list_layers(chunk)]
    counts = [replay.take_counts() for replay in replays if isinstance(replay, RouterReplay)]
    if not any(num_replayed for num_replayed, _ in counts):
        return {}
    return {"routing.replayed": sum(one[0] for one in counts), "routing.changed": sum(one[1] for one in counts)}


def select_routing(chunk: Any, pack: Pack, rows: slice) -> Routing | None:
    """Return the routing of the pack's rows that this rank's routers have; `rows` are its context-parallel part."""
    if pack.routing is None:
        return None
    mine = select_rows(chunk, rows)
    return Routing(pack.routing.experts_TLK[mine], pack.routing.is_known_T[mine])


def _list_layers(chunk: Any) -> list[Any]:
    return [layer for layer in chunk.decoder.layers if isinstance(getattr(layer.mlp, "router", None), TopKRouter)]


def _begin(replay: RouterReplay, layer: torch.nn.Module, _: Any, keywords: dict[str, Any]) -> None:
    """Note a call of a layer; a hook before it."""
    params = keywords.get("packed_seq_params")
    routing = params.routing if isinstance(params, PackParams) else None
    replay.begin(_Call(routing, layer.training and torch.is_grad_enabled()))
