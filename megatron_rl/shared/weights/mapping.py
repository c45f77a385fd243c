"""The place of each slice of a Hugging Face tensor in a rank's shard of a Megatron parameter.

Everything is a pure function of the architecture and a rank's coordinates, so each rank knows what the others hold.
Invariants, over all ranks that own pieces:

- the pieces of a parameter cover it once, except for the rows that pad the vocabulary;
- the owned pieces of a tensor cover it once.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

from megatron_rl.errors import InputError
from megatron_rl.shared.weights.families import find_family
from megatron_rl.shared.weights.families.names import Name, Split
from megatron_rl.shared.weights.linear_layers import list_blocks, list_shapes
from megatron_rl.types import Architecture, Latents

Shape = tuple[int, ...]

HEAD, SCORE, BIAS = "lm_head.weight", "score.weight", "score.bias"
"""The output layers of language models, and of classifiers of sequences."""
_OF_LINEAR_MODULES = (Split.QKV, Split.GATE_UP, Split.ROWS, Split.COLUMNS)


@dataclasses.dataclass(frozen=True)
class Coordinates:
    """A rank's place in the parallel groups, which alone decides what the rank holds."""

    tensor_rank: int = 0
    tensor_size: int = 1
    pipeline_rank: int = 0
    data_rank: int = 0
    """Rank among the replicas of the dense parameters; context-parallel ranks count as replicas."""
    expert_rank: int = 0
    expert_size: int = 1
    expert_tensor_rank: int = 0
    expert_tensor_size: int = 1
    expert_data_rank: int = 0
    """Rank among the replicas of the experts."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """`length` entries along `dim` that begin at `source` in the tensor `name` and at `target` in the shard."""

    name: str
    dim: int
    source: int
    target: int
    length: int


@dataclasses.dataclass(frozen=True)
class ShardMap:
    """The pieces of one rank's shard of one parameter."""

    shape: Shape
    pieces: tuple[Piece, ...]
    owned: bool
    """Whether this rank exports these pieces."""


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    name: str
    shape: Shape
    dtype: str

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class Mapping:
    """The tensors that the parameters of one architecture consist of."""

    def __init__(self, architecture: Architecture):
        self.architecture = architecture
        self._family = find_family(architecture.family)
        self._names = [name for name in self._family.names if name.when(architecture)]
        self._by_parameter = {parameter: name for name in self._names for parameter in name.parameters}

    @property
    def stacks_experts(self) -> bool:
        """Check if files store all experts of a layer in one tensor (`stored_forms.py`)."""
        return self._family.stacks_experts

    def manifest(self, dtype: str | None = None) -> list[TensorSpec]:
        """List every tensor of the checkpoint, in the order of the layers; tied tensors appear once.

        `dtype` is that of tensors whose dtype the family does not set.
        """
        dtype = dtype or self.architecture.dtype
        specs = []
        for name, layer, expert in self._instances():
            if name.exported:
                for source, shape in zip(name.sources, self._source_shapes(name), strict=True):
                    specs.append(TensorSpec(source.format(layer=layer, expert=expert), shape, name.dtype or dtype))
        return specs

    @property
    def embedding(self) -> str:
        """The name of the embedding's tensor."""
        return next(name for name in self._names if name.split is Split.VOCABULARY).sources[0]

    @property
    def has_tower(self) -> bool:
        """Check if a folder holds a vision model too."""
        return self._family.images is not None

    @property
    def may_leave_out(self) -> bool:
        """Check if a folder may hold tensors that are not trained."""
        return self._family.has_prediction_layers or self.has_tower

    def is_left_out(self, tensor: str) -> bool:
        """Check whether a tensor belongs to the vision model, or to a layer after the model's own.

        A critic leaves out the output layers of language models and classifiers.
        """
        if self.architecture.is_critic and tensor in (HEAD, SCORE, BIAS):
            return True
        return self._family.is_left_out(tensor, self.architecture.num_layers)

    def is_of_tower(self, tensor: str) -> bool:
        """Check whether a tensor belongs to the folder's vision model."""
        return self._family.is_of_tower(tensor)

    def linear_modules(self) -> Iterator[tuple[str, bool]]:
        """Yield the linear modules that ranks divide by rows or columns, and whether each belongs to an expert."""
        for name, layer, expert in self._instances():
            if name.exported and name.split in _OF_LINEAR_MODULES and name.parameters[0].endswith(".weight"):
                for source in name.sources:
                    yield source.format(layer=layer, expert=expert).removesuffix(".weight"), expert is not None

    def describe(self, parameter: str) -> tuple[Split, bool, list[str]]:
        """Return how a parameter is divided, whether it belongs to an expert, and the names of its tensors."""
        name, layer, expert = self._resolve(parameter)
        return name.split, expert is not None, [source.format(layer=layer, expert=expert) for source in name.sources]

    def shard(self, parameter: str, coordinates: Coordinates, padded_vocab_size: int) -> ShardMap:
        """Map the shard of `parameter` at these coordinates; the name has global layer and expert numbers."""
        name, layer, expert = self._resolve(parameter)
        sources = [source.format(layer=layer, expert=expert) for source in name.sources]
        is_expert = expert is not None
        rank = coordinates.expert_tensor_rank if is_expert else coordinates.tensor_rank
        size = coordinates.expert_tensor_size if is_expert else coordinates.tensor_size
        shapes = self._source_shapes(name)
        blocks = self._blocks(name, sources, shapes, size, padded_vocab_size)
        dim = 1 if name.split is Split.COLUMNS else 0
        total = sum(length for _, _, length in blocks)
        if name.split is Split.WHOLE:
            rank, size = 0, 1
        elif total % size:
            raise InputError(
                f"{parameter} has {total} {'columns' if dim else 'rows'}, which cannot be divided over {size} "
                f"tensor-parallel ranks: write another --tensor-model-parallel-size"
            )
        length = total // size
        shape = tuple(length if i == dim else n for i, n in enumerate(shapes[0]))
        pieces = tuple(_intersect(blocks, dim, rank * length, length))
        replica = coordinates.expert_data_rank if is_expert else coordinates.data_rank
        part = coordinates.expert_tensor_rank if is_expert else coordinates.tensor_rank
        is_first = replica == 0 and (name.split is not Split.WHOLE or part == 0)
        return ShardMap(shape, pieces, name.exported and is_first)

    def _instances(self) -> Iterator[tuple[Name, int | None, int | None]]:
        """Yield every parameter of the model: embedding, layers in order, head."""
        layered = [name for name in self._names if "{layer}" in name.parameters[0]]
        outer = [name for name in self._names if name not in layered]
        yield from ((name, None, None) for name in outer if name.parameters[0].startswith("embedding"))
        num_experts = self.architecture.experts.num_experts if self.architecture.experts else 0
        for layer in range(self.architecture.num_layers):
            of_layer = [name for name in layered if name.layers.contain(self.architecture, layer)]
            for name in of_layer:
                if "{expert}" not in name.parameters[0]:
                    yield name, layer, None
            for expert in range(num_experts):
                yield from ((name, layer, expert) for name in of_layer if "{expert}" in name.parameters[0])
        yield from ((name, None, None) for name in outer if not name.parameters[0].startswith("embedding"))

    def _resolve(self, parameter: str) -> tuple[Name, int | None, int | None]:
        pattern, layer, expert = _normalize(parameter)
        if pattern not in self._by_parameter:
            raise InputError(
                f"the {self.architecture.family} family does not name the parameter {parameter}: "
                f"add it to the family's names, or leave out the flag that creates it"
            )
        return self._by_parameter[pattern], layer, expert

    def _source_shapes(self, name: Name) -> list[Shape]:
        a = self.architecture
        if a.latents is not None and (shape := _find_latent_shape(a, a.latents, name.parameters[0])) is not None:
            return [shape]
        query, key = a.num_attention_heads * a.kv_channels, a.num_query_groups * a.kv_channels
        parameter = name.parameters[0]
        of_linear_layer = list_shapes(parameter, name.sources, a)
        if of_linear_layer is not None:
            return of_linear_layer
        ffn = a.ffn_hidden_size
        if a.experts and "{expert}" in parameter:
            ffn = a.experts.ffn_hidden_size
        elif a.experts and "shared_experts" in parameter:
            ffn = a.experts.shared_ffn_hidden_size
        if name.split is Split.VOCABULARY:
            shapes: list[Shape] = [(a.vocab_size, a.hidden_size)]
        elif name.split is Split.QKV:
            shapes = [(query * (1 + a.attention_gate), a.hidden_size), (key, a.hidden_size), (key, a.hidden_size)]
        elif name.split is Split.GATE_UP:
            shapes = [(ffn, a.hidden_size)] * 2
        elif name.split is Split.COLUMNS:
            shapes = [(a.hidden_size, query if "self_attention" in parameter else ffn)]
        elif parameter.endswith("softmax_offset"):
            shapes = [(a.num_attention_heads,)]
        elif parameter.endswith(("router.weight", "router.bias")):
            shapes = [(_num_experts(a), a.hidden_size)]
        elif parameter.endswith("router.expert_bias"):
            shapes = [(_num_experts(a),)]
        elif parameter.endswith("gate_weight"):
            shapes = [(1, a.hidden_size)]
        elif parameter.endswith(("q_layernorm.weight", "k_layernorm.weight")):
            shapes = [(a.kv_channels,)]
        elif parameter.endswith(("q_norm.weight", "k_norm.weight")):
            shapes = [(query if parameter.endswith("q_norm.weight") else key,)]
        else:
            shapes = [(a.hidden_size,)]
        return [shape[:1] for shape in shapes] if parameter.endswith(".bias") else shapes

    def _blocks(
        self, name: Name, sources: list[str], shapes: list[Shape], size: int, padded_vocab_size: int
    ) -> list[tuple[str | None, int, int]]:
        """Describe the whole parameter as a sequence of (tensor, first entry, length); tensor None is padding."""
        a = self.architecture
        if name.split is Split.QKV:
            width, (query, key, value) = a.kv_channels, sources
            return [
                block
                for group in range(a.num_query_groups)
                for block in (
                    *_list_queries(query, group, a), (key, group * width, width), (value, group * width, width)
                )
            ]  # fmt: skip
        if name.split is Split.KEY_HEADS:
            assert a.linear is not None
            return [*list_blocks(name.parameters[0], sources, a.linear)]
        if name.split is Split.GATE_UP:
            rows = shapes[0][0]
            if rows % size:
                raise InputError(
                    f"{sources[0]} has {rows} rows, which cannot be divided over {size} tensor-parallel ranks: "
                    f"write another --tensor-model-parallel-size"
                )
            part = rows // size
            return [(source, rank * part, part) for rank in range(size) for source in sources]
        if name.split is Split.VOCABULARY:
            return [(sources[0], 0, a.vocab_size), (None, 0, padded_vocab_size - a.vocab_size)]
        return [(sources[0], 0, shapes[0][1 if name.split is Split.COLUMNS else 0])]


def _list_queries(query: str, group: int, a: Architecture) -> list[tuple[str | None, int, int]]:
    """List the rows of a group's queries. With a gate, each head of the source has its query and then its gate."""
    heads, width = a.num_attention_heads // a.num_query_groups, a.kv_channels
    if not a.attention_gate:
        return [(query, group * heads * width, heads * width)]
    numbers = range(group * heads, (group + 1) * heads)
    return [(query, (2 * head + gate) * width, width) for gate in (0, 1) for head in numbers]


def _find_latent_shape(a: Architecture, latents: Latents, parameter: str) -> Shape | None:
    """Return the shape of a parameter of multi-latent attention; None if it is none."""
    found = re.search(r"\.self_attention\.(\w+)\.", parameter)
    if found is None:
        return None
    query_rank = latents.query_rank or 0
    shapes = {
        "linear_q_proj": (a.num_attention_heads * a.kv_channels, a.hidden_size),
        "linear_q_down_proj": (query_rank, a.hidden_size),
        "q_layernorm": (query_rank,),
        "linear_q_up_proj": (a.num_attention_heads * a.kv_channels, query_rank),
        "linear_kv_down_proj": (latents.kv_rank + latents.rotary_dim, a.hidden_size),
        "kv_layernorm": (latents.kv_rank,),
        "linear_kv_up_proj": (a.num_attention_heads * (latents.plain_dim + latents.value_dim), latents.kv_rank),
        "linear_proj": (a.hidden_size, a.num_attention_heads * latents.value_dim),
    }
    return shapes[found[1]]


def _num_experts(architecture: Architecture) -> int:
    assert architecture.experts is not None
    return architecture.experts.num_experts


def _intersect(blocks: list[tuple[str | None, int, int]], dim: int, start: int, length: int) -> Iterator[Piece]:
    """Yield the parts of the blocks that lie in [start, start + length) of their concatenation."""
    position = 0
    for name, source, block_length in blocks:
        first, last = max(position, start), min(position + block_length, start + length)
        if name is not None and first < last:
            yield Piece(name, dim, source + first - position, first - start, last - first)
        position += block_length


@functools.cache
def _normalize(parameter: str) -> tuple[str, int | None, int | None]:
    """Return the parameter's name with placeholders for its numbers, and the numbers."""
    layer = re.search(r"\.layers\.(\d+)\.", parameter)
    pattern = re.sub(r"\.layers\.\d+\.", ".layers.{layer}.", parameter)
    expert = re.search(r"\.local_experts\.(\d+)\.|\.experts\.linear_fc[12]\.(?:weight|bias)(\d+)$", parameter)
    pattern = re.sub(r"\.local_experts\.\d+\.", ".local_experts.{expert}.", pattern)
    pattern = re.sub(r"(\.experts\.linear_fc[12]\.(?:weight|bias))\d+$", r"\1{expert}", pattern)
    expert_number = next(int(group) for group in expert.groups() if group) if expert else None
    return pattern, int(layer.group(1)) if layer else None, expert_number


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """Counts from which the floating-point operations of a token follow."""

    num_parameters: int
    num_multiplied: int
    """Number of parameters that a token is multiplied with: not the embeddings' table, nor other tokens' experts."""
    attention_width: int
    """Layers times heads times head size: forward, a token computes 4 times this for each token that it sees."""


def measure_model(architecture: Architecture) -> ModelSize:
    """Count the parameters of a model, and those that a token is multiplied with."""
    mapping = Mapping(architecture)
    specs = mapping.manifest()
    experts = architecture.experts
    num_multiplied = 0
    for spec in specs:
        if spec.name == mapping.embedding and not architecture.tied_embeddings:
            continue
        if experts is not None and ".experts." in spec.name:
            num_multiplied += spec.num_elements * experts.num_active // experts.num_experts
        else:
            num_multiplied += spec.num_elements
    # Products with keys and with values: half of the operations each.
    of_head = (architecture.kv_channels + architecture.value_channels) // 2
    width = architecture.num_full_layers * architecture.num_attention_heads * of_head
    return ModelSize(sum(spec.num_elements for spec in specs), num_multiplied, width)
