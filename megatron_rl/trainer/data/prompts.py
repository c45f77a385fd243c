"""The prompts of a run: those to train on, in order, and those held out."""

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from megatron_rl.config.rollout import read_weights
from megatron_rl.config.settings import DataConfig
from megatron_rl.errors import InputError, UsageError
from megatron_rl.shared.protocol.provenance import name_source
from megatron_rl.shared.protocol.wire import JSON, Prompt, decode_tokens
from megatron_rl.trainer.data.order import Curriculum, MixedOrder, RowOrder, RowSource, draw_held_out, leave_out
from megatron_rl.trainer.data.prompt_files import Row, name_files, read_rows
from megatron_rl.trainer.data.tokenizer import PromptTokenizer


class PromptSource(RowSource[Prompt]):
    """The prompts of a run, numbered from 0 in each list that it returns."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        held_out: Sequence[Prompt] = (),
        *,
        seed: int,
        shuffle: bool = True,
        notes: Sequence[str] = (),
        num_read: int | None = None,
        curriculum: Curriculum | None = None,
        stops: Sequence[int] = (),
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """`weights` belong to sources; without them all rows are alike, whatever their source."""
        fingerprint = _fingerprint(prompts)
        order: RowOrder | MixedOrder
        if weights is None:
            order = RowOrder(len(prompts), fingerprint, seed, shuffle, curriculum)
        else:
            members = _divide_sources(prompts, weights)
            order = MixedOrder(members, list(weights.values()), fingerprint, seed, shuffle, curriculum)
        super().__init__(prompts, held_out, order, notes, num_read, stops)

    def list_kinds(self, limit: int = 16) -> list[Prompt]:
        """Return the first row of each set of columns, in the order of the files; held-out rows come last."""
        kinds: dict[tuple[str, ...], Prompt] = {}
        for prompt in itertools.chain(self._rows, self._held_out):
            kinds.setdefault(tuple(sorted(prompt.columns)), prompt)
        return list(kinds.values())[:limit]

    @property
    def num_resting(self) -> int | None:
        """Number of prompts that rest in the epoch of the next prompt; None without a curriculum."""
        return self._order.num_resting

    @property
    def put_off(self) -> list[str]:
        """Names of prompts that were taken and put off, in the order in which they come again."""
        return [self._rows[row].row for row in self._order.put_off]

    def peek(self, count: int, num_carried: int = 0) -> list[Prompt]:
        return _number(super().peek(count, num_carried))

    def advance(
        self, count: int, num_carried: int = 0, put_off: Sequence[int] = (), rewards: Sequence[float | None] = ()
    ) -> None:
        """Count the next `count` prompts as taken: see `RowOrder.advance`."""
        self._order.advance(count, num_carried, put_off, rewards)

    def held_out(self, limit: int | None = None) -> list[Prompt]:
        return _number(super().held_out(limit))

    def restore(self, state: object) -> None:
        if isinstance(self._order, RowOrder) and isinstance(state, Mapping) and "sources" in state:
            raise InputError(
                "the checkpoint was trained with weights of --prompts, and none are given: give the same, or load its "
                "weights alone, with --finetune"
            )
        super().restore(state)


def _number(prompts: Sequence[Prompt]) -> list[Prompt]:
    return [msgspec.structs.replace(prompt, index=index) for index, prompt in enumerate(prompts)]


@dataclasses.dataclass(frozen=True)
class PromptRows:
    """The rows of a run's files, read and not tokenized yet."""

    trained: Sequence[Row]
    """The rows of --prompts."""
    evaluated: Sequence[Row]
    """The rows of --eval-prompts."""


def read_prompts(config: DataConfig) -> PromptRows:
    """Read all files, so that a fault in the last one is reported before the tokenizer loads."""
    if config.max_prompt_tokens is not None and config.max_prompt_tokens < 1:
        raise UsageError(f"--max-prompt-tokens {config.max_prompt_tokens} leaves every prompt out: write at least 1")
    assert config.prompts is not None
    return PromptRows(
        read_rows([file.path for file in read_weights(config.prompts)], config),
        read_rows(config.eval_prompts, config) if config.eval_prompts else [],
    )


def load_prompts(config: DataConfig, model: Path, *, seed: int, longest: int, vocab_size: int) -> PromptSource:
    """Read, tokenize, filter and divide the prompts of a run: see `tokenize_prompts`."""
    return tokenize_prompts(read_prompts(config), config, model, seed=seed, longest=longest, vocab_size=vocab_size)


def tokenize_prompts(
    read: PromptRows,
    config: DataConfig,
    model: Path,
    *,
    seed: int,
    longest: int,
    vocab_size: int,
    has_environments: bool = False,
    tools: Sequence[JSON] = (),
) -> PromptSource:
    """Tokenize, filter and divide the prompts of a run.

    `longest` is the most tokens that a prompt may have: the length of a sequence less the longest response. Chats tell
    the policy of `tools`, which are schemas.
    """
    rows, eval_rows = read.trained, read.evaluated
    tokenizer = PromptTokenizer.load(model, vocab_size, config, is_left_open=has_environments, tools=tools)
    notes: list[str] = []
    prompts = _fitting(rows, tokenizer, config, longest, "--prompts", notes)
    if config.eval_prompts:
        held_out = _fitting(eval_rows, tokenizer, config, longest, "--eval-prompts", notes)
    else:
        held_out = draw_held_out(prompts, config.held_out, seed)
    # Environments may make different tasks of one prompt.
    trained = leave_out(prompts, held_out, config, notes, *([_identify_task] if has_environments else []))
    num_read = len(rows) + len(eval_rows)
    stops = tokenizer.find_stops((prompt.text for prompt in (*trained, *held_out)), notes)
    return PromptSource(
        trained,
        held_out,
        seed=seed,
        shuffle=config.shuffle,
        notes=notes,
        num_read=num_read,
        curriculum=_build_curriculum(config),
        stops=stops,
        weights=_read_source_weights(config),
    )


def _read_source_weights(config: DataConfig) -> dict[str, float] | None:
    files = read_weights(config.prompts or ())
    names = name_files([file.path for file in files])
    weights = {name: file.weight for name, file in zip(names, files, strict=True) if file.weight is not None}
    return weights or None


def _divide_sources(prompts: Sequence[Prompt], weights: Mapping[str, float]) -> list[list[int]]:
    """Return the numbers of the rows of each source."""
    members: dict[str, list[int]] = {name: [] for name in weights}
    for number, prompt in enumerate(prompts):
        members[name_source(prompt.row)].append(number)
    for name, rows in members.items():
        if not rows:
            raise InputError(f"--prompts {name} has no prompt left to train on: hold out fewer, or leave the file out")
    return list(members.values())


def _fitting(
    rows: Sequence[Row], tokenizer: PromptTokenizer, config: DataConfig, longest: int, flag: str, notes: list[str]
) -> list[Prompt]:
    """Return the prompts that are short enough; add a note that counts the others."""
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
        raise InputError(f"{flag}: all {len(rows)} prompts are longer than {limit} tokens; raise --max-prompt-tokens")
    if num_left_out:
        of = "prompts" if flag == "--prompts" else f"prompts of {flag}"
        are = "is" if num_left_out == 1 else "are"
        notes.append(f"{num_left_out} of {len(rows)} {of} {are} longer than {limit} tokens and left out")
    return prompts


def _identify_task(prompt: Prompt) -> tuple[bytes, str]:
    return prompt.tokens, json.dumps(prompt.columns, sort_keys=True, default=str)


def _build_curriculum(config: DataConfig) -> Curriculum | None:
    if config.rest_below is None and config.rest_above is None:
        return None
    least = -math.inf if config.rest_below is None else config.rest_below
    largest = math.inf if config.rest_above is None else config.rest_above
    return Curriculum(least, largest, config.rest_epochs)


def _fingerprint(prompts: Iterable[Prompt]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(f"{prompt.row}\0{len(prompt.tokens)}\0".encode())
        digest.update(prompt.tokens)
    return digest.hexdigest()
