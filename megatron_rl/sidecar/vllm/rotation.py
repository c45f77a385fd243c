"""The rotation of queries and keys by their positions, in vLLM's multi-latent attention on a CPU.

The operation that vLLM 0.32 has for CPUs expects the columns of all heads of a token in one row. Multi-latent attention
gives it [tokens, heads, columns], and it takes each head for a token: it rotates heads by the positions of other
tokens, and reads and writes past the ends of tensors. `server.PLAIN_ROTATION` makes vLLM rotate in torch, and workers
try the result before an engine is used.
"""

from typing import Any

import torch

_NUM_TOKENS, _NUM_HEADS = 3, 2
# A wrong rotation differs by about 1, and bfloat16 rounds by less.
_TOLERANCE = 0.05


def find_wrong_rotations(model: torch.nn.Module) -> list[str]:
    """Find the layers of multi-latent attention that rotate queries or keys unlike vLLM's definition in torch.

    Layers that share a rope are tried once, and named by the first of them.
    """
    tried = set()
    wrong = []
    for name, layer in model.named_modules():
        rotary = getattr(layer, "rotary_emb", None)
        if rotary is None or not hasattr(layer, "mla_attn") or id(rotary) in tried:
            continue
        tried.add(id(rotary))
        if not _rotates_rightly(layer):
            wrong.append(name)
    return wrong


def _rotates_rightly(layer: Any) -> bool:
    """Rotate parts of wider rows, as the layer does, and compare them with vLLM's definition."""
    rotary, width, plain = layer.rotary_emb, layer.qk_rope_head_dim, layer.qk_nope_head_dim
    # Quantized models have their norms in the dtype that they compute in.
    like = layer.kv_a_layernorm.weight
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(like)

    # The operation reads past the positions that it is given.
    positions = torch.arange(1, 1 + _NUM_TOKENS * _NUM_HEADS, device=like.device)[:_NUM_TOKENS]
    queries = draw(_NUM_TOKENS, _NUM_HEADS, plain + width)[..., plain:]
    keys = draw(_NUM_TOKENS, layer.kv_lora_rank + width)[:, layer.kv_lora_rank :].unsqueeze(1)
    wanted = rotary.forward_native(positions, queries.clone(), keys.clone())
    found = rotary(positions, queries, keys)
    return all(torch.allclose(a, b, rtol=0, atol=_TOLERANCE) for a, b in zip(found, wanted, strict=True))
