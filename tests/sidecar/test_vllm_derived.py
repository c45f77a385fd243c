"""The parameters that vLLM's multi-latent attention derives, compared with the tensor that they must follow from."""

import pytest
import torch

from megatron_rl.sidecar.vllm.derived import find_stale, list_derived

HEADS, PLAIN, VALUE, NARROW = 4, 3, 2, 5
ATTENTION = "model.layers.0.self_attn"
GIVEN = {f"{ATTENTION}.kv_b_proj.weight": torch.randn(HEADS * (PLAIN + VALUE), NARROW)}


def make_model(rank: int, size: int, change: str = "") -> torch.nn.Module:
    """Make a model with what a rank derives, written head by head; the named parameter has a stale number."""
    rows = GIVEN[f"{ATTENTION}.kv_b_proj.weight"]
    mine = range(rank * HEADS // size, (rank + 1) * HEADS // size)
    first = [head * (PLAIN + VALUE) for head in mine]
    derived = {
        "W_UK_T": torch.stack([rows[start : start + PLAIN] for start in first]),
        "W_UV": torch.stack([rows[start + PLAIN : start + PLAIN + VALUE].T for start in first]),
    }
    model = torch.nn.Module()
    inner = model
    for name in f"{ATTENTION}.mla_attn.mla_attn".split("."):
        inner.add_module(name, torch.nn.Module())
        inner = inner.get_submodule(name)
    for name, tensor in derived.items():
        stale = tensor.clone()
        stale[-1, -1, -1] += name == change
        inner.register_parameter(name, torch.nn.Parameter(stale))
    return model


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_what_follows_from_the_given_tensor_is_not_stale(rank: int, size: int) -> None:
    model = make_model(rank, size)
    assert list_derived(model) == {name for name, _ in model.named_parameters()}
    assert find_stale(model, GIVEN, rank) == []
    assert find_stale(model, {name: 2 * tensor for name, tensor in GIVEN.items()}, rank) != []
    assert list_derived(torch.nn.Linear(2, 2)) == set()


@pytest.mark.parametrize("name", ["W_UK_T", "W_UV"])
def test_a_stale_number_is_found(name: str) -> None:
    assert find_stale(make_model(1, 2, name), GIVEN, 1) == [f"{ATTENTION}.mla_attn.mla_attn.{name}"]


def test_a_load_without_the_tensor_is_found() -> None:
    assert "without" in find_stale(make_model(0, 1), {}, 0)[0]
