"""The tensors of linear layers: their shapes, and their rows in the order of parameters, key head by key head.

Letters: G key heads, D dimensions of a query and a key, I value heads of a key head, V dimensions of a value.
"""

from megatron_rl.types import Architecture, LinearAttention

Shape = tuple[int, ...]
Block = tuple[str, int, int]
"""A tensor, the first of its rows, and their number."""


def list_shapes(parameter: str, sources: tuple[str, ...], architecture: Architecture) -> list[Shape] | None:
    """Return the shapes of the sources of a parameter; None if it is not one of a linear layer alone."""
    one, hidden, kind = architecture.linear, architecture.hidden_size, parameter.partition(".self_attention.")[2]
    if one is None:
        return None
    keys, values = one.num_key_heads * one.key_head_dim, one.num_value_heads * one.value_head_dim
    if kind == "in_proj.weight":
        heads = one.num_value_heads
        rows = {
            "in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * heads, "in_proj_qkv": 2 * keys + values,
            "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads,
        }  # fmt: skip
        return [(rows[source.split(".")[-2]], hidden) for source in sources]
    shapes: dict[str, Shape] = {
        "conv_weight": (2 * keys + values, 1, one.window),
        "A_log": (one.num_value_heads,),
        "dt_bias": (one.num_value_heads,),
        "norm_weight": (one.value_head_dim,),
        "out_proj.weight": (hidden, values),
    }
    return [shapes[kind]] if kind in shapes else None


def list_blocks(parameter: str, sources: list[str], one: LinearAttention) -> list[Block]:
    """List the rows of a parameter whose key heads are divided over ranks.

    For each key head these are its query, its key and the values of its value heads; and in the first product also
    their betas, the inputs of their decays, and their gates.
    """
    if parameter.endswith("conv_weight"):
        list_group = _list_channels
    else:
        list_group = _list_fused if len(sources) == 2 else _list_separate
    return [block for group in range(one.num_key_heads) for block in list_group(sources, group, one)]


def _list_channels(sources: list[str], group: int, one: LinearAttention) -> list[Block]:
    """List the channels of a key head in a tensor with all queries, then all keys, then all values."""
    keys, width, values = one.num_key_heads * one.key_head_dim, one.key_head_dim, _count_values(one)
    firsts = ((group * width, width), (keys + group * width, width), (2 * keys + group * values, values))
    return [(sources[0], first, number) for first, number in firsts]


def _list_fused(sources: list[str], group: int, one: LinearAttention) -> list[Block]:
    """List the rows of a key head in tensors whose rows are in the order of key heads."""
    qkvz, ba = sources
    channels, values = one.channels_of_key_head, _count_values(one)
    copies, first = one.num_value_heads // one.num_key_heads, group * (channels + values)
    return [(qkvz, first, channels), (ba, 2 * group * copies, 2 * copies), (qkvz, first + channels, values)]


def _list_separate(sources: list[str], group: int, one: LinearAttention) -> list[Block]:
    """List the rows of a key head in tensors with one part each."""
    qkv, z, b, a = sources
    copies, values = one.num_value_heads // one.num_key_heads, _count_values(one)
    gates = [(b, group * copies, copies), (a, group * copies, copies), (z, group * values, values)]
    return [*_list_channels([qkv], group, one), *gates]


def _count_values(one: LinearAttention) -> int:
    """Count the rows of the value heads of a key head."""
    return one.num_value_heads // one.num_key_heads * one.value_head_dim
