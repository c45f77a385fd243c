"""Data of one request in micro-batches, where what their inputs begin with in common is computed once.

A pack is a forest: sequences that begin alike share segments, however many of them and wherever they part. A datum's
own targets are those that were sampled, as its provenance says, or that have a weight.

Letters: N targets, S data of the micro-batch.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from megatron_rl.algorithm.sequences import Sequences
from megatron_rl.errors import InputError
from megatron_rl.ops.shared_prompt.layout import ROOT
from megatron_rl.tinker.losses import ServedLoss
from megatron_rl.tinker.work import Datum
from megatron_rl.trainer.data.forest import Segment
from megatron_rl.trainer.data.packing import Pack, pack_segments


@dataclasses.dataclass(eq=False)
class _Node:
    tokens: np.ndarray
    is_own: bool = False
    """Whether a sequence has targets here: another one's targets are not on the same rows."""
    parent: "_Node | None" = None
    children: "list[_Node]" = dataclasses.field(default_factory=list)


class Forest:
    """The sequences of a pack.

    Sequences share the tokens that they begin with. Only those that one of them has targets on are never shared with
    targets of another: the responses to a prompt are segments of their own, however they begin, as in a run.
    """

    def __init__(self) -> None:
        self._root = _Node(np.empty(0, "<i4"))
        self._last: list[_Node] = []
        """The node that each sequence ends with."""
        self.num_tokens = 0

    def add(self, tokens: np.ndarray, num_shared: int) -> None:
        """Add a sequence that has targets on all tokens but its first ones."""
        node, place = self._root, 0
        while place < len(tokens):
            is_own = place >= num_shared
            rest = tokens[place:] if is_own else tokens[place:num_shared]
            alike = [
                (length, child)
                for child in node.children
                if not (is_own and child.is_own) and (length := _count_common(child.tokens, rest))
            ]
            if alike:
                # The longest, and of several the first.
                length, child = max(alike, key=lambda one: one[0])
                child = _divide(child, length)
                child.is_own = child.is_own or is_own
            else:
                child = _Node(rest, is_own, node)
                node.children.append(child)
                self.num_tokens += len(rest)
            place += len(child.tokens)
            node = child
        self._last.append(node)

    def list_segments(self) -> list[Segment]:
        """List the segments, each after its parent."""
        self._starts: dict[int, int] = {}
        segments: list[Segment] = []
        start = 0
        waiting = [(child, ROOT) for child in reversed(self._root.children)]
        while waiting:
            node, parent = waiting.pop()
            self._starts[id(node)] = start
            waiting += [(child, len(segments)) for child in reversed(node.children)]
            segments.append(Segment(node.tokens, parent))
            start += len(node.tokens)
        return segments

    def find_rows(self, number: int) -> np.ndarray:
        """Return the rows of the sequence that was added as this one, once the segments are listed."""
        node, rows = self._last[number], []
        while node.parent is not None:
            rows.append(np.arange(len(node.tokens)) + self._starts[id(node)])
            node = node.parent
        return np.concatenate([np.empty(0, np.int64), *reversed(rows)])


def _divide(node: _Node, length: int) -> _Node:
    """Return the first tokens of a node as a node of their own, of which the rest becomes the only child."""
    if length == len(node.tokens):
        return node
    assert node.parent is not None
    first = _Node(node.tokens[:length], node.is_own, node.parent, [node])
    siblings = node.parent.children
    siblings[siblings.index(node)] = first
    node.tokens, node.parent = node.tokens[length:], first
    return first


def _count_common(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    is_other = a[:length] != b[:length]
    return int(is_other.argmax()) if is_other.any() else length


@dataclasses.dataclass(frozen=True)
class ServedBatch:
    """A micro-batch: a pack, and the values of the loss's inputs for each target.

    The log-prob of a token after the same tokens is computed once for all targets that are not a datum's own.
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
        if (length := len(read_tokens(datum))) > most_tokens:
            raise InputError(
                f"datum {number} has {length} tokens, and a micro-batch {most_tokens}: send shorter ones, or "
                "start the service with a larger --seq-length or --micro-batch-size"
            )
        _add(forest, datum)
        if not packs or forest.num_tokens > most_tokens:
            packs.append([])
            forest = Forest()
            _add(forest, datum)
        packs[-1].append(number)
    return packs


def _add(forest: Forest, datum: Datum) -> None:
    """Add a datum's tokens; if it was sampled, with its last target, which a run has a row for too."""
    tokens, is_own = read_tokens(datum), read_own(datum)
    num_shared = int(is_own.argmax()) // datum.width + 1 if is_own.any() else len(tokens)
    last = np.frombuffer(datum.targets, "<i4")[-1:] if datum.width == 1 and is_own.any() else tokens[:0]
    forest.add(np.concatenate([tokens, last]), num_shared)


def lay_out(data: Sequence[Datum], multiple_of: int, vocab_size: int, loss: ServedLoss) -> ServedBatch:
    """Lay out a pack; without data it consists of padding."""
    forest = Forest()
    for datum in data:
        _add(forest, datum)
    pack = pack_segments(forest.list_segments(), multiple_of, vocab_size=vocab_size)
    rows = [
        np.repeat(forest.find_rows(number)[: len(read_tokens(datum))], datum.width) for number, datum in enumerate(data)
    ]
    targets = [np.frombuffer(datum.targets, "<i4") for datum in data]
    lengths = [len(of_datum) for of_datum in targets]
    flat = _join(targets, np.int64)
    if len(flat) and (flat.min() < 0 or flat.max() >= vocab_size):
        raise InputError(f"a target is outside the vocabulary of {vocab_size}: use the tokenizer of the model")
    values = {
        name: _join([np.frombuffer(datum.inputs[name], "<f4") for datum in data], np.float32) for name in loss.inputs
    }
    of_rows, sequences_N = _join(rows, np.int64), np.repeat(np.arange(len(data)), lengths)
    # Own targets come first, in their order. The others have no gradient, and those that are the same are joined.
    is_own = _join([read_own(datum) for datum in data], np.bool_)
    keys = np.where(is_own, np.arange(len(flat)), len(flat) + of_rows * vocab_size + flat)
    _, first, places = np.unique(keys, return_index=True, return_inverse=True)
    pack = dataclasses.replace(
        pack,
        target_rows_N=torch.from_numpy(of_rows[first]),
        target_tokens_N=torch.from_numpy(flat[first]),
        target_sequences_N=torch.from_numpy(sequences_N[first]),
        num_trained=int(is_own.sum()),
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


def read_own(datum: Datum) -> np.ndarray:
    return np.frombuffer(datum.own or bytes(len(datum.targets) // 4), np.bool_)


def cut(log_probs_N: np.ndarray, data: Sequence[Datum]) -> Iterator[bytes]:
    """Yield the log-probs of each datum of a pack."""
    place = 0
    for datum in data:
        length = len(datum.targets) // 4
        yield log_probs_N[place : place + length].astype("<f4").tobytes()
        place += length


def _join(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype)
