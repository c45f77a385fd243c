"""Layers whose heads our kernels split, and layers that Megatron computes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp

from megatron_rl.trainer.mcore.model import self_attention
from megatron_rl.trainer.mcore.model.fusions import RMSNorm
from megatron_rl.trainer.mcore.model.self_attention import FusedSelfAttention


def make_layer(q_norm: Any, k_norm: Any, num_ranks: int = 1, **fields: Any) -> FusedSelfAttention:
    """Make the parts of a layer that decide whether the kernel computes it."""
    layer = object.__new__(FusedSelfAttention)
    torch.nn.Module.__init__(layer)
    layer.config = SimpleNamespace(num_query_groups=2, **fields)
    layer.world_size, layer.q_layernorm, layer.k_layernorm = num_ranks, q_norm, k_norm
    return layer


def make_norm(**changes: Any) -> torch.nn.Module:
    config: Any = SimpleNamespace(
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=False,
        params_dtype=torch.float32,
        sequence_parallel=False,
    )
    return RMSNorm(config, 8, **changes)


def test_a_layer_with_what_the_kernel_lacks_takes_megatrons_way_and_the_log_names_the_reason_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    norm, other = make_norm(), make_norm(eps=1e-3)
    assert not make_layer(None, None)._takes_megatrons_way
    assert not make_layer(IdentityOp(), IdentityOp(), no_rope_freq=None)._takes_megatrons_way
    assert not make_layer(norm, norm)._takes_megatrons_way
    assert not make_layer(torch.nn.RMSNorm(8, eps=1e-6), torch.nn.RMSNorm(8, eps=1e-6))._takes_megatrons_way
    assert caplog.messages == []
    self_attention._say_once.cache_clear()
    for reason, layer in (
        ("it has no multi_latent_attention", make_layer(None, None, multi_latent_attention=True)),
        ("it has no attention_output_gate", make_layer(norm, norm, attention_output_gate=True)),
        ("it has no rotary_interleaved", make_layer(norm, norm, rotary_interleaved=True)),
        ("it has no no_rope_freq", make_layer(norm, norm, no_rope_freq=[0, 1])),
        ("ranks share a key head", make_layer(norm, norm, num_ranks=4)),
        ("it has no LayerNorm of torch.nn.modules.normalization", make_layer(norm, torch.nn.LayerNorm(8))),
        ("it has no RMSNorm of torch.nn.modules.normalization", make_layer(torch.nn.RMSNorm(8), norm)),
        ("queries and keys must have norms of one kind", make_layer(norm, other)),
        ("queries and keys must have norms of one kind", make_layer(norm, None)),
    ):
        for _ in range(2):
            assert layer._takes_megatrons_way
        assert caplog.messages[-1] == f"--qkv-backend triton leaves layers to Megatron's own operations: {reason}"
    assert len(caplog.messages) == 8


def test_norms_that_are_read_and_not_called_still_wait_for_their_gathered_weights() -> None:
    q_norm, k_norm = make_norm(), make_norm()
    waited: list[torch.nn.Module] = []
    for norm in (q_norm, k_norm):
        norm.register_forward_pre_hook(lambda module, _: waited.append(module))
    norms = make_layer(q_norm, k_norm)._read_norms()
    assert norms is not None
    assert waited == [q_norm, k_norm]
    assert (norms.q_weight_D, norms.k_weight_D) == (q_norm.weight, k_norm.weight)
    assert make_layer(IdentityOp(), IdentityOp())._read_norms() is None
