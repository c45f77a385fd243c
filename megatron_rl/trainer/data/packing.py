"""Groups of a prompt and its responses, laid out in the one buffer of a micro-batch.

Letters: T tokens of the buffer, N targets (tokens whose log-probability is wanted), M targets that the rows of one part
predict.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch

from megatron_rl.errors import InputError
from megatron_rl.ops.shared_prompt.layout import ROOT, Layout
from megatron_rl.trainer.data.forest import Segment, Tokens
from megatron_rl.trainer.data.routing import Routing


@dataclasses.dataclass(frozen=True)
class Pack:
    """One micro-batch: a buffer of segments, with its targets and the rows that predict them."""

    layout: Layout
    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    target_rows_N: torch.Tensor
    """Row whose hidden state predicts the target. A prompt's last row predicts the first token of each response."""
    target_tokens_N: torch.Tensor
    target_sequences_N: torch.Tensor
    """Number of the response that the target belongs to, counted over the pack."""
    num_padding: int = 0
    """Number of the last tokens that only fill the buffer."""
    places_of_parts: tuple[torch.Tensor, ...] = ()
    """For each part of the rows, [M]: the targets that it predicts. Ranks that share a pack have one part each."""
    routing: Routing | None = None
    """The experts that engines chose; None if routers choose for themselves."""
    num_trained: int | None = None
    """Number of the first targets that have gradients; None if all have."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the buffer, padding included."""
        return self.layout.num_tokens

    @property
    def num_targets(self) -> int:
        return len(self.target_tokens_N)

    def divided(self, num_parts: int) -> "Pack":
        """Return the pack with the targets of each of `num_parts` equal parts; if it is on a device, the host waits."""
        part_N = self.target_rows_N.cpu() // max(1, self.num_tokens // num_parts)
        places = tuple((part_N == part).nonzero().squeeze(1).to(self.tokens_T.device) for part in range(num_parts))
        return dataclasses.replace(self, places_of_parts=places)

    def places_of_part(self, part: int, num_parts: int) -> torch.Tensor:
        """Return the targets that a part's rows predict, [M]; M may be 0."""
        pack = self if len(self.places_of_parts) == num_parts else self.divided(num_parts)
        return pack.places_of_parts[part]


def separate_responses(groups: Sequence[tuple[Tokens, Sequence[Tokens]]]) -> list[tuple[Tokens, list[Tokens]]]:
    """Put each response into a group of its own, after its own copy of the prompt."""
    return [(prompt, [response]) for prompt, responses in groups for response in responses]


def pack_groups(
    groups: Sequence[tuple[Tokens, Sequence[Tokens]]],
    multiple_of: int = 1,
    padding_token: int = 0,
    vocab_size: int | None = None,
) -> Pack:
    """Lay out each group, first its prompt and then its responses; every token of a response is a target."""
    segments: list[Segment] = []
    numbers = itertools.count()
    for prompt, responses in groups:
        root = len(segments)
        segments.append(Segment(prompt, ROOT))
        segments += [Segment(response, root, next(numbers)) for response in responses]
    return pack_segments(segments, multiple_of, padding_token, vocab_size)


def pack_turns(sequences: Sequence[Sequence[Tokens]], multiple_of: int = 1, vocab_size: int | None = None) -> Pack:
    """Lay out sequences of turns. Every second turn is a response to all turns before it, with targets as in groups."""
    segments: list[Segment] = []
    numbers = itertools.count()
    for turns in sequences:
        for number, turn in enumerate(turns):
            parent = len(segments) - 1 if number else ROOT
            segments.append(Segment(turn, parent, next(numbers) if number % 2 else None))
    return pack_segments(segments, multiple_of, vocab_size=vocab_size)


def pack_sequences(sequences: Sequence[Tokens], multiple_of: int = 1, padding_token: int = 0) -> Pack:
    """Pack plain sequences that share no tokens: every token but the first is a target."""
    return pack_groups([(tokens[:1], [tokens[1:]]) for tokens in sequences], multiple_of, padding_token)


def pack_segments(
    segments: Sequence[Segment], multiple_of: int = 1, padding_token: int = 0, vocab_size: int | None = None
) -> Pack:
    """Pack segments. With `vocab_size`, raise for a token outside it: the model would silently embed it as zeros."""
    layout = Layout(tuple(len(one.tokens) for one in segments), tuple(one.parent for one in segments))
    rows, tokens, sequences = _targets(layout, segments)
    # Padding is a segment that no token attends to. The buffer must not be empty: every rank needs a row to compute.
    padding = -layout.num_tokens % multiple_of or (multiple_of if layout.num_tokens == 0 else 0)
    if padding:
        layout = Layout((*layout.lengths, padding), (*layout.parents, ROOT))
        segments = [*segments, Segment([padding_token] * padding, ROOT)]
    flat = np.concatenate([np.asarray(segment.tokens, dtype=np.int64) for segment in segments])
    if vocab_size is not None and (flat.min() < 0 or flat.max() >= vocab_size):
        wrong = flat[(flat < 0) | (flat >= vocab_size)][0]
        raise InputError(
            f"token {wrong} is outside the vocabulary of {vocab_size}: the tokenizer belongs to another model"
        )
    return Pack(
        layout=layout,
        tokens_T=torch.from_numpy(flat),
        positions_T=torch.from_numpy(layout.positions),
        target_rows_N=torch.from_numpy(rows),
        target_tokens_N=torch.from_numpy(tokens),
        target_sequences_N=torch.from_numpy(sequences),
        num_padding=padding,
    )


def _targets(layout: Layout, segments: Sequence[Segment]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the row, the token and the response's number of each target."""
    rows: list[np.ndarray] = []
    tokens: list[np.ndarray] = []
    numbers: list[np.ndarray] = []
    for number, segment in enumerate(segments):
        if segment.response is None:
            continue
        start, length = int(layout.starts[number]), layout.lengths[number]
        before = layout.last_row(segment.parent)
        # If nothing stands before it, no row predicts the first token.
        first = 0 if before is not None else 1
        if length > first:
            predicting = np.arange(start - 1, start + length - 1)
            predicting[0] = before if before is not None else 0
            kept = slice(None) if segment.mask is None else segment.mask[first:]
            rows.append(predicting[first:][kept])
            tokens.append(np.asarray(segment.tokens[first:], dtype=np.int64)[kept])
            numbers.append(np.full(len(rows[-1]), segment.response, dtype=np.int64))
    empty = np.zeros(0, dtype=np.int64)
    return (np.concatenate([empty, *rows]), np.concatenate([empty, *tokens]), np.concatenate([empty, *numbers]))
