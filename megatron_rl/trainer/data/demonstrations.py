"""Demonstrations: chats, or prompts with completions, whose responses are learned by heart, token by token.

A row becomes one sequence of turns, or several. In a sequence given turns and responses alternate, and only the tokens
of responses are trained on. Invariants:

- a response follows exactly the tokens that a prompt of the same messages has when a response to it is sampled;
- the turns of a chat share a sequence as long as the chat template writes the beginning of the chat in the same way,
  whatever follows. If it writes the beginning of a response differently, the response begins a new sequence;
- a response ends with a token that ends responses: the template's end of a turn in a chat, the tokenizer's end of text
  after text. The template's text after that token is given, not learned.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.settings import DataConfig
from megatron_rl.errors import InputError
from megatron_rl.shared.protocol.wire import JSON
from megatron_rl.trainer.data.order import RowOrder, RowSource, draw_held_out, leave_out
from megatron_rl.trainer.data.prompt_files import ASSISTANT, Row, read_demonstrations, read_pairs
from megatron_rl.trainer.data.tokenizer import PromptTokenizer

_ROWS_AT_A_TIME = 1024

Turns = tuple[np.ndarray, ...]
"""Tokens of the turns of a sequence: a given turn, a response, a given turn, a response, and so on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Demonstration:
    """A row of the data, as tokens."""

    row: str
    """Identity of the row."""
    sequences: tuple[Turns, ...]

    @property
    def tokens(self) -> bytes:
        """Tokens of the prompt."""
        return self.sequences[0][0].tobytes()

    @property
    def num_tokens(self) -> int:
        return sum(len(turn) for turns in self.sequences for turn in turns)

    @property
    def length(self) -> int:
        """Return the number of tokens that --seq-length bounds."""
        return self.num_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Pair(Demonstration):
    """Two responses to a prompt: the first sequence has the one that was preferred.

    Two more are responses to another prompt, if the loss reads them.
    """

    @property
    def prompt(self) -> np.ndarray:
        return self.sequences[0][0]

    @property
    def responses(self) -> list[np.ndarray]:
        return [response for _, response in self.sequences]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + sum(map(len, self.responses))

    @property
    def length(self) -> int:
        return len(self.prompt) + max(map(len, self.responses))


class DemonstrationSource(RowSource[Demonstration]):
    """The demonstrations or pairs of a run."""

    def __init__(
        self,
        demonstrations: Sequence[Demonstration],
        held_out: Sequence[Demonstration] = (),
        *,
        seed: int,
        shuffle: bool = True,
        notes: Sequence[str] = (),
        num_read: int | None = None,
        stops: Sequence[int] = (),
    ) -> None:
        order = RowOrder(len(demonstrations), _fingerprint(demonstrations), seed, shuffle)
        super().__init__(demonstrations, held_out, order, notes, num_read, stops)


def load_demonstrations(
    config: DataConfig,
    model: Path,
    stage: str = "sft",
    has_strangers: bool = False,
    *,
    seed: int,
    longest: int,
    vocab_size: int,
) -> DemonstrationSource:
    """Read, tokenize, filter and divide the demonstrations or pairs of a run, each of at most `longest` tokens."""
    assert config.prompts is not None
    read = read_pairs if stage == "dpo" else read_demonstrations
    # All files are read before the tokenizer loads, so that a fault in the last file is reported within seconds.
    rows = read(config.prompts, config)
    eval_rows = read(config.eval_prompts, config) if config.eval_prompts else []
    tokenizer = PromptTokenizer.load(model, vocab_size, config)
    notes: list[str] = []
    fitting = _fitting(rows, tokenizer, longest, "--prompts", notes)
    if config.eval_prompts:
        held_out = _fitting(eval_rows, tokenizer, longest, "--eval-prompts", notes)
    else:
        held_out = draw_held_out(fitting, config.held_out, seed)
    trained = leave_out(fitting, held_out, config, notes)
    if stage == "dpo" and has_strangers:
        # Held-out pairs may be few, or have one prompt.
        held_out = add_strangers([*held_out, *trained], longest)[: len(held_out)]
        trained = add_strangers(trained, longest)
    stops = tokenizer.find_stops((tokenizer.text(row) for row in (*rows, *eval_rows)), notes)
    return DemonstrationSource(
        trained,
        held_out,
        seed=seed,
        shuffle=config.shuffle,
        notes=notes,
        num_read=len(rows) + len(eval_rows),
        stops=stops,
    )


def _fitting(
    rows: Sequence[Row], tokenizer: PromptTokenizer, longest: int, flag: str, notes: list[str]
) -> list[Demonstration]:
    """Return the demonstrations or pairs that are short enough; add a note that counts the others."""
    tokenized, kind = tokenize(rows, tokenizer), "demonstrations"
    if any(row.rejected is not None for row in rows):
        tokenized, kind = tokenize_pairs(rows, tokenizer), "pairs"
    fitting = [one for one in tokenized if one.length <= longest]
    num_left_out = len(rows) - len(fitting)
    if not fitting:
        raise InputError(f"{flag}: all {len(rows)} {kind} are longer than --seq-length {longest}; raise it")
    if num_left_out:
        are = "is" if num_left_out == 1 else "are"
        notes.append(
            f"{num_left_out} of {len(rows)} {kind} of {flag} {are} longer than --seq-length {longest} and left out"
        )
    return fitting


def tokenize(rows: Sequence[Row], tokenizer: PromptTokenizer) -> Iterator[Demonstration]:
    for start in range(0, len(rows), _ROWS_AT_A_TIME):
        batch = rows[start : start + _ROWS_AT_A_TIME]
        written = [_write(row, tokenizer) for row in batch]
        for row, one, sequences in zip(batch, written, _encode(written, tokenizer), strict=True):
            for turn in itertools.chain.from_iterable(sequences):
                tokenizer.check_vocabulary(row, turn)
            if not all(len(response) for turns in sequences for response in turns[1::2]):
                raise row.error("has a response without tokens; write one, or leave the row out")
            if one.is_chat:
                _check_ends(row, sequences, tokenizer)
            kept = tuple(tuple(turn.astype(np.int32) for turn in turns) for turns in sequences)
            yield Demonstration(row.identity, kept)


def tokenize_pairs(rows: Sequence[Row], tokenizer: PromptTokenizer) -> Iterator[Pair]:
    """Tokenize both responses of each row as the response of a demonstration."""
    others = [dataclasses.replace(row, completion=row.rejected) for row in rows]
    of_rows = zip(rows, tokenize(rows, tokenizer), tokenize(others, tokenizer), strict=True)
    for row, chosen, rejected in of_rows:
        pair = Pair(row.identity, (*chosen.sequences, *rejected.sequences))
        if np.array_equal(pair.responses[0], pair.responses[1]):
            raise row.error("has two responses of the same tokens: nothing is preferred; leave the row out")
        yield pair


def add_strangers(pairs: Sequence[Any], longest: int) -> list[Any]:
    """Add to each pair the responses to the next other prompt, cut to sequences of at most `longest` tokens."""
    if not pairs:
        return []
    following = other = pairs[0]
    extended = []
    # Backwards through two rounds, since the last pairs find theirs among the first.
    for pair in reversed([*pairs, *pairs]):
        if not np.array_equal(pair.prompt, following.prompt):
            other = following
        room = longest - len(pair.prompt)
        strangers = [(pair.prompt, response[:room]) for response in other.responses]
        extended.append(dataclasses.replace(pair, sequences=(*pair.sequences, *strangers)))
        following = pair
    if np.array_equal(other.prompt, following.prompt):
        raise InputError(
            f"all {len(pairs)} pairs have one prompt, and --dpo-loss-type kto compares with responses to others: write "
            "pairs of several prompts, or choose another loss"
        )
    return extended[: len(pairs) - 1 : -1]


@dataclasses.dataclass(frozen=True, slots=True)
class _Written:
    """The turns of each of a row's sequences, as text. The special tokens of a chat are part of its text."""

    sequences: list[list[str]]
    is_chat: bool


def _write(row: Row, tokenizer: PromptTokenizer) -> _Written:
    given, follows = tokenizer.text(row), row.completion
    assert follows is not None
    if isinstance(given, str):
        if not isinstance(follows, str):
            raise row.error("has a chat that follows plain text; add --prompt-chat, or write the prompt as messages")
        return _Written([[given, follows]], is_chat=False)
    answers = [{"role": ASSISTANT, "content": follows}] if isinstance(follows, str) else follows
    return _Written(_write_chat(row, [*given, *answers], len(given), tokenizer), is_chat=True)


def _write_chat(row: Row, messages: list[JSON], num_given: int, tokenizer: PromptTokenizer) -> list[list[str]]:
    """Write the chat up to each of the assistant's messages after the given ones, in as few sequences as possible."""
    sequences: list[list[str]] = []
    before = ""
    for number in range(num_given, len(messages)):
        if messages[number]["role"] != ASSISTANT:
            continue
        opening = tokenizer.render(row, messages[:number])
        whole = tokenizer.render(row, messages[: number + 1], is_open=False)
        if not whole.startswith(opening):
            raise row.error(
                f"is a chat whose message {number + 1} does not begin as the chat template opens the {ASSISTANT}'s "
                "turn; write what the template opens into the message, or prompt and completion as text"
            )
        turns = [opening, whole[len(opening) :]]
        if sequences and opening.startswith(before):
            sequences[-1] += [opening[len(before) :], turns[1]]
        else:
            sequences.append(turns)
        before = whole
    return sequences


def _encode(written: Sequence[_Written], tokenizer: PromptTokenizer) -> Iterator[list[list[np.ndarray]]]:
    """Yield the tokens of each row's sequences."""
    tokens: dict[bool, Iterator[np.ndarray]] = {}
    for is_chat in (False, True):
        beginnings = [
            text
            for one in written
            if one.is_chat == is_chat
            for turns in one.sequences
            for text in itertools.accumulate(turns)
        ]
        # A template's output already has its special tokens.
        tokens[is_chat] = iter(tokenizer.encode(beginnings, adds_special_tokens=not is_chat))
    for one in written:
        sequences = [_divide(turns, [next(tokens[one.is_chat]) for _ in turns], tokenizer) for turns in one.sequences]
        if one.is_chat:
            yield [_cut(turns, tokenizer.end_of_turn) for turns in sequences]
        else:
            yield [[prompt, _ended(completion, tokenizer.end_of_text)] for prompt, completion in sequences]


def _check_ends(row: Row, sequences: Sequence[Sequence[np.ndarray]], tokenizer: PromptTokenizer) -> None:
    """Raise an InputError that names the row unless each response of a chat ends with the template's end of a turn."""
    end = tokenizer.end_of_turn
    if end is None:
        raise row.error(
            f"is a chat, and the chat template of --hf-model {tokenizer.folder} writes no special token after an "
            f"answer. The model would not learn where to stop: have the template write one, or write prompt and "
            f"completion as text"
        )
    if any(response[-1] != end for turns in sequences for response in turns[1::2]):
        raise row.error(
            f"has an answer after which the chat template does not write its end of a turn, "
            f"{tokenizer.tokenizer.convert_ids_to_tokens(end)}: have it write that token after each answer, or write "
            f"prompt and completion as text"
        )


def _divide(turns: Sequence[str], beginnings: Sequence[np.ndarray], tokenizer: PromptTokenizer) -> list[np.ndarray]:
    """Divide a sequence's tokens into those of its turns; `beginnings` holds its tokens up to the end of each turn.

    If a token would cross the end of a turn, the next turn is tokenized by itself, as it would be sampled.
    """
    found: list[np.ndarray] = []
    before = np.zeros(0, dtype=np.int64)
    for text, tokens in zip(turns, beginnings, strict=True):
        if np.array_equal(tokens[: len(before)], before):
            turn = tokens[len(before) :]
        else:
            turn = tokenizer.encode([text], adds_special_tokens=False)[0]
        found.append(turn)
        before = np.concatenate([before, turn])
    return found


def _cut(turns: list[np.ndarray], end: int | None) -> list[np.ndarray]:
    """Move the tokens after the last end of each response into the next turn."""
    moved = np.zeros(0, dtype=np.int64)
    found = []
    for number, turn in enumerate(turns):
        if number % 2 == 0:
            turn = np.concatenate([moved, turn])
        elif (ends := np.flatnonzero(turn == end)).size:
            turn, moved = turn[: ends[-1] + 1], turn[ends[-1] + 1 :]
        else:
            moved = moved[:0]
        found.append(turn)
    return found


def _ended(tokens: np.ndarray, end: int | None) -> np.ndarray:
    """Return a response with its end, which is appended if it is missing."""
    if end is None or tokens[-1:].tolist() == [end]:
        return tokens
    return np.append(tokens, end)


def _fingerprint(demonstrations: Iterable[Demonstration]) -> str:
    """Hash the rows, their tokens, and the lengths of their turns."""
    digest = hashlib.blake2b(digest_size=16)
    for one in demonstrations:
        lengths = [[len(turn) for turn in turns] for turns in one.sequences]
        digest.update(f"{one.row}\0{lengths}\0".encode())
        for turn in itertools.chain.from_iterable(one.sequences):
            digest.update(turn.astype("<i4").tobytes())
    return digest.hexdigest()
