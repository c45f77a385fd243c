"""Groups of a prompt and its responses, laid out in the one buffer of a micro-batch.

Letters: T tokens of the buffer, N targets (tokens whose log-probability is wanted), M targets that the rows of one part
predict.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from megatron_rl.errors import InputError
from megatron_rl.ops.shared_prompt.layout import ROOT, Layout
from megatron_rl.trainer.data.routing import Routing

Tokens = Sequence[int] | np.ndarray


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
    masks: Sequence[np.ndarray] | None = None,
) -> Pack:
    """Lay out each group, first its prompt and then its responses; every token of a response is a target.

    With `masks`, one for each response, only the tokens that its mask has are. With `vocab_size`, raise for a token
    outside the vocabulary: the model would silently embed it as zeros.
    """
    lengths = [(len(prompt), [len(response) for response in responses]) for prompt, responses in groups]
    layout = Layout.of_groups(lengths)
    segments = [segment for prompt, responses in groups for segment in (prompt, *responses)]
    are_responses = [parent != ROOT for parent in layout.parents]
    return _pack(layout, segments, are_responses, multiple_of, padding_token, vocab_size, masks)


def pack_turns(sequences: Sequence[Sequence[Tokens]], multiple_of: int = 1, vocab_size: int | None = None) -> Pack:
    """Lay out sequences of turns. Every second turn is a response to all turns before it, with targets as in groups."""
    segments = [turn for turns in sequences for turn in turns]
    numbers = [number for turns in sequences for number in range(len(turns))]
    parents = [segment - 1 if number else ROOT for segment, number in enumerate(numbers)]
    layout = Layout(tuple(len(segment) for segment in segments), tuple(parents))
    return _pack(layout, segments, [number % 2 == 1 for number in numbers], multiple_of, 0, vocab_size)


def _pack(
    layout: Layout,
    segments: list[Tokens],
    are_responses: Sequence[bool],
    multiple_of: int,
    padding_token: int,
    vocab_size: int | None,
    masks: Sequence[np.ndarray] | None = None,
) -> Pack:
    rows, tokens, sequences = _targets(layout, segments, are_responses, masks)
    # Padding is a segment that no token attends to. The buffer must not be empty: every rank needs a row to compute.
    padding = -layout.num_tokens % multiple_of or (multiple_of if layout.num_tokens == 0 else 0)
    if padding:
        layout = Layout((*layout.lengths, padding), (*layout.parents, ROOT))
        segments.append([padding_token] * padding)
    flat = np.concatenate([np.asarray(segment, dtype=np.int64) for segment in segments])
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


def pack_sequences(sequences: Sequence[Tokens], multiple_of: int = 1, padding_token: int = 0) -> Pack:
    """Pack plain sequences that share no tokens: every token but the first is a target."""
    return pack_groups([(tokens[:1], [tokens[1:]]) for tokens in sequences], multiple_of, padding_token)


def _targets(
    layout: Layout,
    segments: Sequence[Tokens],
    are_responses: Sequence[bool],
    masks: Sequence[np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the row, the token and the response's number of each target: the tokens of responses that masks have."""
    rows: list[np.ndarray] = []
    tokens: list[np.ndarray] = []
    numbers: list[np.ndarray] = []
    num_responses = 0
    for segment, parent in enumerate(layout.parents):
        if not are_responses[segment]:
            continue
        start, length = int(layout.starts[segment]), layout.lengths[segment]
        before = layout.last_row(parent)
        # If the prompt is empty, no row predicts the first token.
        first = 0 if before is not None else 1
        if length > first:
            predicting = np.arange(start - 1, start + length - 1)
            predicting[0] = before if before is not None else 0
            kept = slice(None) if masks is None else masks[num_responses][first:]
            rows.append(predicting[first:][kept])
            tokens.append(np.asarray(segments[segment][first:], dtype=np.int64)[kept])
            numbers.append(np.full(len(rows[-1]), num_responses, dtype=np.int64))
        num_responses += 1
    empty = np.zeros(0, dtype=np.int64)
    return (np.concatenate([empty, *rows]), np.concatenate([empty, *tokens]), np.concatenate([empty, *numbers]))
