"""Data of one request in micro-batches, where what their inputs begin with in common is computed once.

A pack is a forest: sequences that begin alike share segments, however many of them and wherever they part.

Letters: N targets, S data of the micro-batch.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from megatron_rl.algorithm.sequences import Sequences
from megatron_rl.errors import InputError
from megatron_rl.ops.shared_prompt.layout import ROOT
from megatron_rl.tinker.losses import ServedLoss, find_weight
from megatron_rl.tinker.work import Datum
from megatron_rl.trainer.data.forest import Segment
from megatron_rl.trainer.data.packing import Pack, pack_segments


@dataclasses.dataclass(eq=False)
class _Node:
    tokens: np.ndarray
    children: "dict[int, _Node]" = dataclasses.field(default_factory=dict)


class Forest:
    """The sequences of a pack."""

    def __init__(self) -> None:
        self._root = _Node(np.empty(0, "<i4"))
        self.num_tokens = 0

    def count_new(self, tokens: np.ndarray) -> int:
        """Count the tokens by which a sequence would make the forest larger."""
        node, place = self._root, 0
        while place < len(tokens) and (child := node.children.get(int(tokens[place]))) is not None:
            length = _count_common(child.tokens, tokens[place:])
            place += length
            if length < len(child.tokens):
                break
            node = child
        return len(tokens) - place

    def add(self, tokens: np.ndarray) -> None:
        node = self._root
        self.num_tokens += self.count_new(tokens)
        while len(tokens):
            child = node.children.get(int(tokens[0]))
            if child is None:
                node.children[int(tokens[0])] = _Node(tokens)
                return
            length = _count_common(child.tokens, tokens)
            if length < len(child.tokens) and length < len(tokens):
                _divide(child, length)
            node, tokens = child, tokens[length:]

    def list_segments(self) -> list[Segment]:
        """List the segments, each after its parent."""
        self._starts: dict[int, int] = {}
        segments: list[Segment] = []
        start = 0
        waiting = [(child, ROOT) for child in reversed(self._root.children.values())]
        while waiting:
            node, parent = waiting.pop()
            self._starts[id(node)] = start
            waiting += [(child, len(segments)) for child in reversed(node.children.values())]
            segments.append(Segment(node.tokens, parent))
            start += len(node.tokens)
        return segments

    def find_rows(self, tokens: np.ndarray) -> np.ndarray:
        """Return the rows of a sequence that was added, once the segments are listed."""
        rows, node, place = [np.empty(0, np.int64)], self._root, 0
        while place < len(tokens):
            node = node.children[int(tokens[place])]
            length = min(len(node.tokens), len(tokens) - place)
            rows.append(np.arange(length) + self._starts[id(node)])
            place += length
        return np.concatenate(rows)


def _divide(node: _Node, length: int) -> None:
    """Cut a node after its first tokens; the rest becomes its only child."""
    rest = _Node(node.tokens[length:], node.children)
    node.tokens, node.children = node.tokens[:length], {int(rest.tokens[0]): rest}


def _count_common(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    is_other = a[:length] != b[:length]
    return int(is_other.argmax()) if is_other.any() else length


@dataclasses.dataclass(frozen=True)
class ServedBatch:
    """A micro-batch: a pack, and the values of the loss's inputs for each target.

    The log-prob of a token after the same tokens is computed once for all targets that have no weight.
    """

    pack: Pack
    places_N: torch.Tensor
    """The target of the pack that has each target's log-prob."""
    sequences_N: torch.Tensor
    inputs: Mapping[str, torch.Tensor]
    lengths_S: torch.Tensor
    longest: int

    @property
    def sequences(self) -> Sequences:
        return Sequences(self.sequences_N, self.lengths_S, self.longest)


def divide(data: Sequence[Datum], most_tokens: int) -> list[list[int]]:
    """Divide data, in their order, into packs of at most this many tokens; return the numbers of each pack's data."""
    packs: list[list[int]] = []
    forest = Forest()
    for number, datum in enumerate(data):
        tokens = read_tokens(datum)
        if len(tokens) > most_tokens:
            raise InputError(
                f"datum {number} has {len(tokens)} tokens, and a micro-batch {most_tokens}: send shorter ones, or "
                "start the service with a larger --seq-length or --micro-batch-size"
            )
        if not packs or forest.num_tokens + forest.count_new(tokens) > most_tokens:
            packs.append([])
            forest = Forest()
        forest.add(tokens)
        packs[-1].append(number)
    return packs


def lay_out(data: Sequence[Datum], multiple_of: int, vocab_size: int, loss: ServedLoss) -> ServedBatch:
    """Lay out a pack; without data it consists of padding."""
    forest, sequences = Forest(), [read_tokens(datum) for datum in data]
    for tokens in sequences:
        forest.add(tokens)
    pack = pack_segments(forest.list_segments(), multiple_of, vocab_size=vocab_size)
    rows = [np.repeat(forest.find_rows(one), datum.width) for one, datum in zip(sequences, data, strict=True)]
    targets = [np.frombuffer(datum.targets, "<i4") for datum in data]
    lengths = [len(of_datum) for of_datum in targets]
    flat = _join(targets, np.int64)
    if len(flat) and (flat.min() < 0 or flat.max() >= vocab_size):
        raise InputError(f"a target is outside the vocabulary of {vocab_size}: use the tokenizer of the model")
    values = {
        name: _join([np.frombuffer(datum.inputs[name], "<f4") for datum in data], np.float32) for name in loss.inputs
    }
    of_rows, sequences_N = _join(rows, np.int64), np.repeat(np.arange(len(data)), lengths)
    # Targets with a gradient are not joined: on a device, sums of several would have no fixed order.
    own = np.arange(1, len(flat) + 1)
    is_own = values[find_weight(loss)] != 0 if loss.is_weighed else np.ones(len(flat), dtype=bool)
    keys = np.where(is_own, -own, of_rows * vocab_size + flat)
    _, first, places = np.unique(keys, return_index=True, return_inverse=True)
    pack = dataclasses.replace(
        pack,
        target_rows_N=torch.from_numpy(of_rows[first]),
        target_tokens_N=torch.from_numpy(flat[first]),
        target_sequences_N=torch.from_numpy(sequences_N[first]),
    )
    return ServedBatch(
        pack,
        torch.from_numpy(places),
        torch.from_numpy(sequences_N),
        {name: torch.from_numpy(value) for name, value in values.items()},
        torch.tensor(lengths, dtype=torch.int64),
        max(lengths, default=1),
    )


def read_tokens(datum: Datum) -> np.ndarray:
    return np.frombuffer(datum.tokens, "<i4")


def cut(log_probs_N: np.ndarray, data: Sequence[Datum]) -> Iterator[bytes]:
    """Yield the log-probs of each datum of a pack."""
    place = 0
    for datum in data:
        length = len(datum.targets) // 4
        yield log_probs_N[place : place + length].astype("<f4").tobytes()
        place += length


def _join(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype)
