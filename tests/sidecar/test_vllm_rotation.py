"""The rotation of queries and keys in a model of vLLM's, tried against vLLM's definition in torch."""

import pytest
import torch

from megatron_rl.sidecar.vllm.patches import find_wrong_rotations

WIDTH, PLAIN, NARROW = 8, 4, 6
FAULTS = ("position of another token", "query left as it was", "key left as it was", "each head for a token")


class Rotary(torch.nn.Module):
    """A rope as vLLM's, whose operation has a fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def forward_native(
        self, positions: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._turn(positions, queries), self._turn(positions, keys)

    def forward(
        self, positions: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.fault == "position of another token":
            positions = positions.flip(0)
        rotated_queries, rotated_keys = self.forward_native(positions, queries, keys)
        if self.fault == "each head for a token":
            of_heads = torch.arange(1, 1 + queries.shape[0] * queries.shape[1])
            rotated_queries = self._turn(of_heads, queries.flatten(0, 1).unsqueeze(1)).view(queries.shape)
        return (
            queries if self.fault == "query left as it was" else rotated_queries,
            keys if self.fault == "key left as it was" else rotated_keys,
        )

    def _turn(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        angle = positions[:, None, None] / 10 ** torch.arange(WIDTH // 2)
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.exp(1j * angle)).flatten(-2).to(x.dtype)


def make_model(*faults: str) -> torch.nn.Module:
    model = torch.nn.Module()
    for number, fault in enumerate(faults):
        layer = torch.nn.Linear(2, 2)
        layer.rotary_emb, layer.mla_attn = Rotary(fault), torch.nn.Module()
        layer.kv_a_layernorm = torch.nn.LayerNorm(2)
        layer.qk_rope_head_dim, layer.qk_nope_head_dim, layer.kv_lora_rank = WIDTH, PLAIN, NARROW
        model.add_module(f"layer_{number}", layer)
    return model


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_rotation_is_found(fault: str) -> None:
    assert find_wrong_rotations(make_model("", fault)) == ["layer_1"]


def test_a_right_rotation_is_not_found_wrong() -> None:
    assert find_wrong_rotations(make_model("", "")) == []
    assert find_wrong_rotations(make_model("").bfloat16()) == []
    assert find_wrong_rotations(torch.nn.Linear(2, 2)) == []
