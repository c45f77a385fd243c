"""Rows of a pack over context-parallel ranks: attention's heads change hands, and log-probs come together."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_rl.ops.shared_prompt.backends import naive
from megatron_rl.ops.shared_prompt.layout import Layout
from megatron_rl.trainer.data.packing import pack_groups
from megatron_rl.trainer.mcore.model import context
from tests import hf_models
from tests.distributed.layouts import CASES, build, divisor, start_session
from tests.distributed.parity import Computed, Groups, expected, shared_loss
from tests.ranks import run_ranks
from tests.truth import worst_of

LAYOUT = Layout.of_groups([(5, [4, 1, 6]), (3, [5])])
HEAD_DIM = 8
# Heads of the queries, and of keys and values: equal; fewer; fewer than ranks; a number that two does not divide.
HEADS = ((4, 4), (8, 2), (4, 1), (6, 3))

Named = dict[str, torch.Tensor]


def tensors_of(num_heads: int, num_groups: int) -> Named:
    """Draw queries, keys, values, and the gradient of the output: the same on every rank."""
    generator = torch.Generator().manual_seed(num_heads)
    counts = {"query": num_heads, "key": num_groups, "value": num_groups, "gradient": num_heads}
    return {
        name: torch.randn(LAYOUT.num_tokens, count, HEAD_DIM, generator=generator) for name, count in counts.items()
    }


def attention(given: Named, group: dist.ProcessGroup | None) -> Named:
    """Compute the output and gradients of this rank's rows; without a group, of all rows."""
    rows = slice(None) if group is None else context.own_rows(LAYOUT.num_tokens, group)
    leaves = [given[name][rows].clone().requires_grad_() for name in ("query", "key", "value")]
    q_THD, k_TGD, v_TGD = leaves if group is None else context.exchange_rows_for_heads(*leaves, group)
    out_THD = naive.attention(q_THD, k_TGD, v_TGD, LAYOUT, scale=0.3)
    out_RHD = out_THD if group is None else context.exchange_heads_for_rows(out_THD, group)
    gradients = torch.autograd.grad(out_RHD, leaves, given["gradient"][rows])
    return {"out": out_RHD.detach(), **dict(zip(("query", "key", "value"), gradients, strict=True))}


def uneven_batches() -> list[Groups]:
    """Return batches with all targets in the first half of the rows, all in the second half, one, and none."""
    short, long = hf_models.sequences([9, 40])
    group, silent = (short[:4], [short[4:]]), (long, [[]])
    return [[group, silent], [silent, group], [([1], [[2]])], []]


@dataclasses.dataclass
class OfRank:
    """The results of one rank, twice each; of the model in each layout."""

    attention: dict[tuple[int, int], list[Named]]
    model: dict[str, list[Computed]]


def compute(folder: Path) -> OfRank:
    """Compute everything twice."""
    dist.init_process_group("gloo")
    results = OfRank({}, {})
    for heads in HEADS:
        given = tensors_of(*heads)
        results.attention[heads] = [attention(given, dist.group.WORLD) for _ in range(2)]
    with pytest.raises(ValueError, match="a pack of 7 tokens cannot be divided over 2 context-parallel ranks: pad it"):
        context.own_rows(7, dist.group.WORLD)
    for name in ("CP2", "TP2+SP"):
        with start_session(CASES[name]) as session:
            model = build(session, CASES[name], folder, attention_backend="merge")
            packs = [pack_groups(groups, divisor(CASES[name].sizes)) for groups in uneven_batches()]
            results.model[name] = [
                Computed(model.forward_backward(packs, shared_loss), model.gradients()) for _ in range(2)
            ]
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.draw("qwen3", tmp_path_factory.mktemp("model"), num_key_value_heads=2)


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[OfRank]:
    return run_ranks(compute, 2, folder)


@pytest.mark.parametrize("heads", HEADS)
def test_attention_and_its_gradients_over_ranks_equal_those_of_one_rank(heads, ranks) -> None:
    given = tensors_of(*heads)
    alone, truth = attention(given, None), attention({name: one.double() for name, one in given.items()}, None)
    over_ranks = {name: torch.cat([of_rank.attention[heads][0][name] for of_rank in ranks]) for name in truth}
    error, name = worst_of(over_ranks, alone, truth)
    assert error <= 1, name


def test_ranks_without_a_target_take_part(ranks, folder) -> None:
    everywhere = expected(folder, uneven_batches())
    for layout in ("CP2", "TP2+SP"):
        ours = ranks[0].model[layout][0]
        assert [len(of_pack) for of_pack in ours.log_probs] == [5, 5, 1, 0]
        worst = everywhere.worst(ours)
        print(f"{layout}: error / bound: {worst}")
        assert all(error <= 1 for error, _ in worst.values())


def test_results_are_bitwise_the_same_each_time(ranks) -> None:
    for of_rank in ranks:
        for once, again in of_rank.attention.values():
            assert all(torch.equal(value, again[name]) for name, value in once.items())
        once, again = of_rank.model["CP2"]
        assert all(torch.equal(*pair) for pair in zip(once.log_probs, again.log_probs, strict=True))
        assert all(torch.equal(gradient, again.gradients[name]) for name, gradient in once.gradients.items())
