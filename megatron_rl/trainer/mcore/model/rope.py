"""Rotary frequencies as Hugging Face's model families define them, for given positions."""

import math

import torch

from megatron_rl.types import Rope, RopeKind


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Compute a frequency for each pair of dimensions that rotates, in fp32, and on the host: all devices get the same.

    The result is as short as the part of a head that rotates, and Megatron leaves the other dimensions as they are.
    """
    num_rotated = int(head_dim * rope.rotary_fraction)
    with torch.device("cpu"):
        exponents = torch.arange(0, num_rotated, 2, dtype=torch.int64).float() / num_rotated
        plain = 1.0 / rope.base**exponents
        if rope.kind is RopeKind.DEFAULT:
            return plain
        if rope.kind is RopeKind.LINEAR:
            return plain / rope.factor
        return _llama3(rope, plain) if rope.kind is RopeKind.LLAMA3 else _yarn(rope, num_rotated)


def attention_factor(rope: Rope) -> float:
    """Return the factor that queries and keys get besides the rotation: 1 for all kinds but yarn."""
    if rope.kind is not RopeKind.YARN:
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
    return _yarn_scale(rope.factor, 1.0)


def score_factor(rope: Rope) -> float:
    """Return the factor that yarn gives to whole scores of multi-latent attention, besides that of the rotated part."""
    if rope.kind is not RopeKind.YARN or not rope.mscale_all_dim:
        return 1.0
    return _yarn_scale(rope.factor, rope.mscale_all_dim) ** 2


def _yarn_scale(factor: float, share: float) -> float:
    return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0


def angles(frequencies_F: torch.Tensor, positions_T: torch.Tensor, is_interleaved: bool = False) -> torch.Tensor:
    """Compute the angle of each dimension that rotates at each position, in Megatron's shape: [T, 1, 1, D]."""
    angles_TF = pair_angles(frequencies_F, positions_T)
    angles_TD = angles_TF.repeat_interleave(2, dim=-1) if is_interleaved else torch.cat((angles_TF, angles_TF), dim=-1)
    return angles_TD[:, None, None, :]


def pair_angles(frequencies_F: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
    """Compute the angle of each pair of dimensions that rotates at each position."""
    return torch.outer(positions_T.float(), frequencies_F)


def _llama3(rope: Rope, plain: torch.Tensor) -> torch.Tensor:
    """Slow long waves by the factor, keep short ones, and interpolate between them."""
    assert rope.original_max_positions is not None
    wavelengths = 2 * math.pi / plain
    longest_kept = rope.original_max_positions / rope.high_freq_factor
    shortest_slowed = rope.original_max_positions / rope.low_freq_factor
    slowed = plain / rope.factor
    share = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - share) * slowed + share * plain
    scaled = torch.where(wavelengths > shortest_slowed, slowed, plain)
    return torch.where((wavelengths <= shortest_slowed) & (wavelengths >= longest_kept), between, scaled)


def _yarn(rope: Rope, head_dim: int) -> torch.Tensor:
    """Ramp over the dimensions from kept to slowed waves, placed by each wave's rotations in the original length."""
    assert rope.original_max_positions is not None
    original = rope.original_max_positions

    def dimension(num_rotations: float) -> float:
        return head_dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.base))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    wavelengths = rope.base ** (torch.arange(0, head_dim, 2).float() / head_dim)
    kept = 1 - ramp
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
