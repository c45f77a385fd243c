"""The prompts of a run: which ones are trained on, in which order, and which are held out."""

import hashlib
import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megatron_rl.config.settings import DataConfig
from megatron_rl.data.prompt_files import Row, read_rows
from megatron_rl.data.tokenizer import PromptTokenizer
from megatron_rl.errors import InputError, UsageError
from megatron_rl.protocol.wire import Prompt, decode_tokens


class PromptState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many prompts a source has given, and what identifies the data and order that this number refers to."""

    num_taken: int
    seed: int
    shuffle: bool
    num_rows: int
    fingerprint: str
    put_off: list[int] = []
    """Rows that were taken and are to come again, in this order."""


class PromptSource:
    """The prompts to train on, taken in an order that is a function of data set, seed and epoch.

    - Every row is taken exactly once per epoch; a take may end one epoch and begin the next.
    - What is taken depends on how many prompts were taken before, and not on how many at a time.
    - What was put off when it was taken is kept, in order, until it is asked for.
    - A source that is restored goes on as if it had never been stopped.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        held_out: Sequence[Prompt] = (),
        *,
        seed: int,
        shuffle: bool = True,
        notes: Sequence[str] = (),
        num_read: int | None = None,
    ) -> None:
        assert prompts
        self._prompts = list(prompts)
        self._held_out = list(held_out)
        self._seed = seed
        self._shuffle = shuffle
        self._num_taken = 0
        self._put_off: list[int] = []
        self._order = (-1, np.zeros(0, dtype=np.int64))
        self.num_read = len(self._prompts) + len(self._held_out) if num_read is None else num_read
        """Rows of all files, those that are left out included."""
        self.notes = tuple(notes)
        """What a person should know about the data; each note is printed once."""
        self.fingerprint = _fingerprint(self._prompts)
        """Of the rows to train on: their identities and tokens, in order."""
        self.longest_prompt = max(len(decode_tokens(prompt.tokens)) for prompt in (*prompts, *held_out))
        """The most tokens of a prompt, those held out included."""

    def list_kinds(self, limit: int = 16) -> list[Prompt]:
        """The first row of each set of columns, those to train on before those held out, in the order of the files."""
        kinds: dict[tuple[str, ...], Prompt] = {}
        for prompt in itertools.chain(self._prompts, self._held_out):
            kinds.setdefault(tuple(sorted(prompt.columns)), prompt)
        return list(kinds.values())[:limit]

    @property
    def num_rows(self) -> int:
        return len(self._prompts)

    @property
    def num_held_out(self) -> int:
        return len(self._held_out)

    @property
    def num_taken(self) -> int:
        """Prompts taken so far, over all epochs."""
        return self._num_taken

    @property
    def num_put_off(self) -> int:
        """How many prompts were taken before, and put off."""
        return len(self._put_off)

    @property
    def epochs(self) -> float:
        """How many passes over the data set have been made."""
        return self._num_taken / self.num_rows

    def take(self, count: int) -> list[Prompt]:
        """The next prompts, numbered from 0; they count as taken."""
        taken = self.peek(count)
        self.advance(count)
        return taken

    def peek(self, count: int, num_carried: int = 0) -> list[Prompt]:
        """The next prompts, numbered from 0, the first of them put off earlier; the same again until some are taken."""
        rows = self._peek_rows(count, num_carried)
        return [msgspec.structs.replace(self._prompts[row], index=index) for index, row in enumerate(rows)]

    def advance(self, count: int, num_carried: int = 0, put_off: Sequence[int] = ()) -> None:
        """Count so many as taken; `put_off` are the places, among these, of prompts that are to come again."""
        rows = self._peek_rows(count, num_carried)
        self._num_taken += count - num_carried
        self._put_off = self._put_off[num_carried:] + [rows[index] for index in put_off]

    def held_out(self, limit: int | None = None) -> list[Prompt]:
        """The first `limit` of the prompts that are never trained on, numbered from 0; always the same."""
        return [msgspec.structs.replace(prompt, index=index) for index, prompt in enumerate(self._held_out[:limit])]

    def state(self) -> dict[str, Any]:
        """Plain JSON from which `restore` goes on."""
        state: dict[str, Any] = msgspec.to_builtins(self._state())
        return state

    def restore(self, state: object) -> None:
        """Go on from that state; raise an InputError that says what differs if data set or order are not the same."""
        try:
            saved = msgspec.convert(state, PromptState)
        except msgspec.ValidationError as error:
            raise InputError(
                f"the checkpoint's place in the prompts cannot be read: {error}; load another one"
            ) from None
        own = self._state()
        differences = []
        if (saved.num_rows, saved.fingerprint) != (own.num_rows, own.fingerprint):
            differences.append(
                f"other prompts ({saved.num_rows} rows, fingerprint {saved.fingerprint}; now {own.num_rows} rows, "
                f"fingerprint {own.fingerprint}): give the same files, --hf-model, keys, filters and held-out split"
            )
        if saved.seed != own.seed:
            differences.append(f"seed {saved.seed} (now {own.seed}): give --seed {saved.seed}")
        if saved.shuffle != own.shuffle:
            given, todo = (
                ("shuffled prompts", "leave out") if saved.shuffle else ("prompts in the files' order", "give")
            )
            differences.append(f"{given}: {todo} --no-shuffle-prompts")
        if differences:
            raise InputError(
                f"the checkpoint was trained with {'; and with '.join(differences)}; or load its weights alone, with "
                f"--finetune"
            )
        if saved.num_taken < 0:
            raise InputError(f"the checkpoint has taken {saved.num_taken} prompts, which is below 0: load another one")
        strangers = [row for row in saved.put_off if not 0 <= row < self.num_rows]
        if strangers:
            raise InputError(f"the checkpoint has put off row {strangers[0]} of {self.num_rows}: load another one")
        self._num_taken, self._put_off = saved.num_taken, saved.put_off

    def _state(self) -> PromptState:
        return PromptState(
            num_taken=self._num_taken,
            seed=self._seed,
            shuffle=self._shuffle,
            num_rows=self.num_rows,
            fingerprint=self.fingerprint,
            put_off=self._put_off,
        )

    def _peek_rows(self, count: int, num_carried: int) -> list[int]:
        rows = self._put_off[:num_carried]
        for number in range(self._num_taken, self._num_taken + count - len(rows)):
            epoch, place = divmod(number, self.num_rows)
            rows.append(int(self._order_of(epoch)[place]))
        return rows

    def _order_of(self, epoch: int) -> np.ndarray:
        if self._order[0] != epoch:
            order = _shuffled(self.num_rows, self._seed, epoch) if self._shuffle else np.arange(self.num_rows)
            self._order = (epoch, order)
        return self._order[1]


def load_prompts(config: DataConfig, model: Path, *, seed: int, longest: int, vocab_size: int) -> PromptSource:
    """Read, tokenize, filter and divide the prompts of a run.

    `longest` is the most tokens of a prompt: the length of a sequence less the longest response.
    """
    _check(config)
    assert config.prompts is not None
    # All files are read before the tokenizer loads: a fault in the last one is reported within seconds.
    rows = read_rows(config.prompts, config)
    eval_rows = read_rows(config.eval_prompts, config, "--eval-prompts") if config.eval_prompts else []
    tokenizer = PromptTokenizer.load(model, vocab_size, config)
    notes: list[str] = []
    prompts = _fitting(rows, tokenizer, config, longest, "--prompts", notes)
    if config.eval_prompts:
        held_out = _fitting(eval_rows, tokenizer, config, longest, "--eval-prompts", notes)
    else:
        held_out = _drawn(prompts, config.held_out, seed)
    trained = _not_held_out(prompts, held_out, config, notes)
    num_read = len(rows) + len(eval_rows)
    return PromptSource(trained, held_out, seed=seed, shuffle=config.shuffle, notes=notes, num_read=num_read)


def _check(config: DataConfig) -> None:
    if not config.prompts:
        raise UsageError("no prompts are given: write --prompts FILE.jsonl")
    if config.held_out < 0:
        raise UsageError(f"--prompts-held-out {config.held_out} is below 0: write how many to hold out")
    if config.held_out and config.eval_prompts:
        raise UsageError(
            f"--prompts-held-out {config.held_out} and --eval-prompts both say what is evaluated: leave one out"
        )
    if config.max_prompt_tokens is not None and config.max_prompt_tokens < 1:
        raise UsageError(f"--max-prompt-tokens {config.max_prompt_tokens} leaves every prompt out: write at least 1")
    trained = {os.path.realpath(path) for path in config.prompts}
    for path in config.eval_prompts or ():
        if os.path.realpath(path) in trained:
            raise UsageError(
                f"{path} is in --prompts and in --eval-prompts: leave it out of one, or use --prompts-held-out"
            )


def _fitting(
    rows: Sequence[Row], tokenizer: PromptTokenizer, config: DataConfig, longest: int, flag: str, notes: list[str]
) -> list[Prompt]:
    """Return the prompts that are short enough; add a note of how many are left out."""
    limit = config.max_prompt_tokens
    prompts = []
    for row, prompt in zip(rows, tokenizer.prompts(rows), strict=True):
        length = len(decode_tokens(prompt.tokens))
        if limit is not None and length > limit:
            continue
        if length > longest:
            raise row.error(
                f"has a prompt of {length} tokens, and more than {longest} leave no room for a response; leave longer "
                f"ones out with --max-prompt-tokens {longest}, raise --seq-length, or lower --rollout-max-tokens"
            )
        prompts.append(prompt)
    num_left_out = len(rows) - len(prompts)
    if not prompts:
        raise InputError(
            f"{flag}: all {len(rows)} prompts are longer than {limit} tokens, so none is left; raise "
            f"--max-prompt-tokens"
        )
    if num_left_out:
        of = "prompts" if flag == "--prompts" else f"prompts of {flag}"
        are = "is" if num_left_out == 1 else "are"
        notes.append(f"{num_left_out} of {len(rows)} {of} {are} longer than {limit} tokens and left out")
    return prompts


def _drawn(prompts: Sequence[Prompt], count: int, seed: int) -> list[Prompt]:
    """Draw `count` prompts by seed and row identity alone: filters and other rows hardly change which are drawn."""
    return sorted(prompts, key=lambda prompt: _digest(f"held out\0{seed}\0{prompt.row}"))[:count]


def _not_held_out(
    prompts: Sequence[Prompt], held_out: Sequence[Prompt], config: DataConfig, notes: list[str]
) -> list[Prompt]:
    """Return the prompts to train on: those whose tokens differ from every held-out prompt's."""
    tokens = {prompt.tokens for prompt in held_out}
    kept = [prompt for prompt in prompts if prompt.tokens not in tokens]
    num_drawn = 0 if config.eval_prompts else len(held_out)
    num_same = len(prompts) - num_drawn - len(kept)
    if not kept:
        split = "--eval-prompts" if config.eval_prompts else f"--prompts-held-out {config.held_out}"
        raise InputError(
            f"{split} of {len(prompts)} prompts leaves none to train on, where prompts of the same tokens count as "
            f"one; hold out fewer"
        )
    if num_same:
        are = "is" if num_same == 1 else "are"
        notes.append(f"{num_same} of {len(prompts)} prompts {are} the same as held-out ones and left out")
    return kept


def _shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of an epoch. Of numpy's generators only RandomState gives the same numbers in every version."""
    words = np.frombuffer(_digest(f"epoch\0{seed}\0{epoch}"), dtype="<u4")
    return np.random.RandomState(words).permutation(count)


def _fingerprint(prompts: Iterable[Prompt]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(f"{prompt.row}\0{len(prompt.tokens)}\0".encode())
        digest.update(prompt.tokens)
    return digest.hexdigest()


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
