"""Recordings of what a model computed for a sequence: the inputs and outputs of its parts.

A recording is made by hooks in an engine's workers (`sidecar/vllm/watching.py`) or in the trainer's model
(`drift/trained_model.py`), and is a file of tensors. Tensors have a row for each token of the sequence, in its order.
Logits and log-probs alone have a row for each token that was sampled.
"""

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


class ModelPart(enum.StrEnum):
    """A part of a model, in the order in which a layer computes.

    A part that joins several is recorded where one kernel or module computes them and leaves nothing between.
    """

    EMBEDDING = "embedding"
    ATTENTION_NORM = "norm before attention"
    QKV = "products of queries, keys and values"
    NORMED_QKV = "norm before attention, and products of queries, keys and values"
    QUERY_NORM = "norm of queries"
    KEY_NORM = "norm of keys"
    ROTATION = "rotation"
    NORMED_ROTATION = "norms and rotation of queries and keys"
    ATTENTION = "attention"
    ATTENTION_OUTPUT = "product after attention"
    MLP_NORM = "norm before the MLP"
    GATE_UP = "products of gate and up"
    NORMED_GATE_UP = "norm before the MLP, and products of gate and up"
    ACTIVATION = "activation"
    DOWN = "product down"
    EXPERTS = "experts"
    LAST_NORM = "last norm"
    LOGITS = "logits"
    LOG_PROBS = "logits and log-probs"


@dataclasses.dataclass(frozen=True)
class LayerPart:
    """A part in a layer; layers of the ends of a model are -1."""

    part: ModelPart
    layer: int = -1

    def __str__(self) -> str:
        return str(self.part) if self.layer < 0 else f"{self.part} of layer {self.layer}"


Tensors = Mapping[str, torch.Tensor]

TEMPERATURE = "temperature"
"""The name of the temperature among the inputs of log-probs; it is not recorded, and no precision rounds it."""

DIVIDED = {
    ModelPart.QKV: ("queries", "keys", "values"),
    ModelPart.NORMED_QKV: ("queries", "keys", "values"),
    ModelPart.QUERY_NORM: ("in", "out"),
    ModelPart.KEY_NORM: ("in", "out"),
    ModelPart.ROTATION: ("queries", "keys", "rotated queries", "rotated keys"),
    ModelPart.NORMED_ROTATION: ("queries", "keys", "rotated queries", "rotated keys"),
    ModelPart.ATTENTION: ("queries", "keys", "values", "out"),
    ModelPart.ATTENTION_OUTPUT: ("in",),
    ModelPart.GATE_UP: ("gate", "up"),
    ModelPart.NORMED_GATE_UP: ("gate", "up"),
    ModelPart.ACTIVATION: ("gate", "up", "out"),
    ModelPart.DOWN: ("in",),
}
"""The tensors whose columns tensor-parallel ranks divide; each holds the others whole."""

JOINED = {
    ModelPart.QKV: ModelPart.NORMED_QKV,
    ModelPart.ROTATION: ModelPart.NORMED_ROTATION,
    ModelPart.GATE_UP: ModelPart.NORMED_GATE_UP,
}
"""The parts that may be computed together with those before them, and what they are then recorded as."""


class Recording:
    def __init__(self, points: Mapping[LayerPart, Tensors]) -> None:
        self._points = dict(points)

    def __getitem__(self, point: LayerPart) -> Tensors:
        return self._points[point]

    def __iter__(self) -> Iterator[LayerPart]:
        return iter(self._points)

    def of(self, part: ModelPart) -> list[LayerPart]:
        return sorted((point for point in self._points if point.part is part), key=lambda point: point.layer)

    def changed(self, changes: Mapping[LayerPart, Tensors]) -> "Recording":
        """Return it with other tensors at some points."""
        return Recording({**self._points, **{point: {**self[point], **change} for point, change in changes.items()}})

    def keep_response(self, num_prompt: int, num_sampled: int) -> "Recording":
        """Return it with the rows of a prompt and the tokens that were sampled for it alone.

        Logits of a prompt that an engine reads in several steps come after each step, and all but the last predict no
        sampled token. An engine that schedules steps ahead also computes rows after the token that ends a response.
        """
        num_tokens = len(self[LayerPart(ModelPart.EMBEDDING)]["tokens"])
        points: dict[LayerPart, Tensors] = {}
        for point, tensors in self._points.items():
            first, count = 0, num_prompt + num_sampled - 1
            if point.part is ModelPart.LOGITS:
                # Each token after the prompt has a row, and so has each step of the prompt.
                first, count = len(tensors["out"]) - (num_tokens - num_prompt) - 1, num_sampled
            points[point] = {name: tensor[first : first + count] for name, tensor in tensors.items()}
        return Recording(points)

    def save(self, path: Path) -> None:
        tensors = {
            # A file takes no tensor twice, and one part's output may be another's input.
            f"{point.layer}|{point.part}|{name}": tensor.clone(memory_format=torch.contiguous_format)
            for point, of_point in self._points.items()
            for name, tensor in of_point.items()
        }
        save_file(tensors, path)

    @classmethod
    def load(cls, path: Path) -> "Recording":
        points: dict[LayerPart, dict[str, torch.Tensor]] = {}
        for key, tensor in load_file(path).items():
            layer, part, name = key.split("|")
            points.setdefault(LayerPart(ModelPart(part), int(layer)), {})[name] = tensor
        return cls(points)


def join_ranks(ranks: Sequence[Recording]) -> Recording:
    """Join the recordings of tensor-parallel ranks, each of which has a part of the heads and of the MLP's columns."""
    first = ranks[0]
    if len(ranks) == 1:
        return first
    points: dict[LayerPart, Tensors] = {}
    for point in first:
        divided = DIVIDED.get(point.part, ())
        points[point] = {
            name: torch.cat([rank[point][name] for rank in ranks], dim=1) if name in divided else tensor
            for name, tensor in first[point].items()
        }
    return Recording(points)


def join_rows(calls: Iterable[tuple[LayerPart, Tensors]]) -> Recording:
    found: dict[LayerPart, dict[str, list[torch.Tensor]]] = {}
    for point, tensors in calls:
        of_point = found.setdefault(point, {})
        for name, tensor in tensors.items():
            of_point.setdefault(name, []).append(tensor)
    return Recording({point: {name: torch.cat(rows) for name, rows in one.items()} for point, one in found.items()})
