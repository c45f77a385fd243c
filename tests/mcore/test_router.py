"""Megatron's router as DeepSeek-V2's: it chooses the experts of the groups that have the largest scores."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

from megatron_rl.command_line.model_checks import _check_architecture
from megatron_rl.trainer.data.routing import Routing
from megatron_rl.trainer.mcore.model.replay import RouterReplay, _Call
from megatron_rl.trainer.mcore.model.router import (
    ChoosingRouter,
    ExpertChoice,
    choose_from_groups,
    choose_in_order,
    settle_choices,
)
from megatron_rl.types import Architecture, Experts

NUM_TOKENS, HIDDEN, EXPERTS, ACTIVE, GROUPS, ACTIVE_GROUPS, FACTOR = 200, 16, 16, 6, 8, 3, 2.5


@pytest.fixture
def twin() -> DeepseekV2TopkRouter:
    config = transformers.DeepseekV2Config(
        hidden_size=HIDDEN, num_attention_heads=4, n_routed_experts=EXPERTS, num_experts_per_tok=ACTIVE, n_group=GROUPS,
        topk_group=ACTIVE_GROUPS, routed_scaling_factor=FACTOR, topk_method="group_limited_greedy",
    )  # fmt: skip
    router = DeepseekV2TopkRouter(config)
    torch.manual_seed(0)
    torch.nn.init.normal_(router.weight, std=0.1)
    return router


def route(logits: torch.Tensor, replay: object) -> torch.Tensor:
    """Return the weight of each expert for each token, as Megatron's router computes it."""
    weights, is_chosen = moe_utils.topk_routing_with_score_function(
        logits, ACTIVE, use_pre_softmax=True, num_groups=GROUPS, group_topk=ACTIVE_GROUPS, scaling_factor=FACTOR,
        score_function="softmax", router_replay=replay,
    )  # fmt: skip
    assert torch.equal(is_chosen, weights != 0)
    return weights


def test_weights_and_their_gradients_are_those_of_transformers(twin: DeepseekV2TopkRouter) -> None:
    hidden = torch.randn(NUM_TOKENS, HIDDEN)
    logits, wanted, experts = twin(hidden)
    wanted = torch.zeros_like(logits).scatter(1, experts, wanted)
    given = logits.detach().requires_grad_()
    weights = route(given, ExpertChoice(None, choose_from_groups))
    torch.testing.assert_close(weights, wanted)
    slope = torch.randn_like(weights)
    (of_ours,) = torch.autograd.grad((weights * slope).sum(), given)
    (of_twin,) = torch.autograd.grad((wanted * slope).sum(), logits)
    torch.testing.assert_close(of_ours, of_twin)
    # Megatron's own choice is another one, so that the comparison can fail.
    assert ((route(logits, None) != 0) != (wanted != 0)).any(dim=1).float().mean() > 0.1


def test_a_replay_takes_it_for_the_routers_own_choice(twin: DeepseekV2TopkRouter) -> None:
    logits, _, experts = twin(torch.randn(NUM_TOKENS, HIDDEN))
    own = route(logits, ExpertChoice(None, choose_from_groups))
    replay = RouterReplay(0)
    assert torch.equal(route(logits, ExpertChoice(replay, choose_from_groups)), own)
    given = torch.arange(NUM_TOKENS)[:, None].add(torch.arange(ACTIVE)) % EXPERTS
    is_known = torch.arange(NUM_TOKENS) % 2 == 0
    replay.begin(_Call(Routing(given[:, None].to(torch.uint8), is_known), is_trained=True))
    replayed = route(logits, ExpertChoice(replay, choose_from_groups))
    assert torch.equal(replayed[~is_known], own[~is_known])
    chosen = torch.zeros_like(own, dtype=torch.bool).scatter(1, given, True)
    assert torch.equal((replayed != 0)[is_known], chosen[is_known])
    num_replayed, num_changed = replay.take_counts()
    assert num_replayed == ACTIVE * NUM_TOKENS // 2
    is_own = (given[:, :, None] == experts[:, None, :]).any(dim=2)
    assert num_changed == (~is_own[is_known]).sum()


def make_router(kind: type = TopKRouter) -> Any:
    router: Any = kind.__new__(kind)
    torch.nn.Module.__init__(router)
    router.router_replay = None
    return router


OF_A_RECIPE = type("OwnRouter", (TopKRouter,), {})


@pytest.mark.parametrize(
    ("kind", "score", "group_topk", "choose"),
    [
        (TopKRouter, "softmax", 3, choose_from_groups),
        (TopKRouter, "softmax", None, choose_in_order),
        (TopKRouter, "sigmoid", None, choose_in_order),
        (TopKRouter, "sigmoid", 3, None),
        (OF_A_RECIPE, "sigmoid", None, None),
    ],
)
def test_routers_compare_groups_by_their_largest_scores_or_keep_the_order_or_stay(
    kind: type, score: str, group_topk: int | None, choose: Any
) -> None:
    router = make_router(kind)
    router.score_function, router.config = score, SimpleNamespace(moe_router_group_topk=group_topk)
    settle_choices(torch.nn.ModuleList([router]))
    assert getattr(router, "choose", None) is choose
    assert isinstance(router, ChoosingRouter) is (choose is not None)
    assert choose is not None or type(router) is kind


def test_weights_of_experts_are_the_same_with_gradients_and_without() -> None:
    logits = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0))

    def route_plainly() -> torch.Tensor:
        weights, _ = moe_utils.topk_routing_with_score_function(
            logits, 8, score_function="sigmoid", router_replay=ExpertChoice(None, choose_in_order)
        )
        return weights

    with torch.no_grad():
        frozen = route_plainly()
    assert torch.equal(frozen, route_plainly())


def test_a_router_is_asked_with_its_own_replay_and_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(TopKRouter, "routing", lambda self, logits: asked.append(self.router_replay))
    router = make_router(ChoosingRouter)
    router.choose = choose_from_groups
    router.router_replay = replay = RouterReplay(0)
    router.routing(torch.zeros(1))
    assert isinstance(asked[0], ExpertChoice)
    assert asked[0]._replay is replay
    assert router.router_replay is replay


@pytest.mark.parametrize(("groups", "active", "is_refused"), [(GROUPS, ACTIVE_GROUPS, True), (1, 1, False)])
def test_a_fused_router_is_refused_where_it_would_choose_other_groups(
    groups: int, active: int, is_refused: bool
) -> None:
    experts = Experts(EXPERTS, ACTIVE, 8, num_groups=groups, num_active_groups=active)
    model = Architecture("deepseek_v2", 2, 8, 8, 2, 2, 4, 1000, 64, experts=experts)
    settings = SimpleNamespace(transformer=SimpleNamespace(moe_router_fusion=True))
    assert any("--moe-router-fusion" in line for line in _check_architecture(settings, model)) is is_refused
