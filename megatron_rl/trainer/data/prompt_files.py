"""Files of prompts, JSONL or Parquet, and their rows. Errors name file and line."""

import codecs
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.config.rollout import ROW_FORMATS
from megatron_rl.config.settings import DataConfig
from megatron_rl.errors import InputError, PlatformError
from megatron_rl.flag import suggest_nearest
from megatron_rl.rewards.types import ANSWER, GIVEN
from megatron_rl.shared.protocol.wire import JSON

_PARQUET_ROWS_AT_A_TIME = 4096

ASSISTANT = "assistant"
"""The role of the messages that a model writes."""
TOOLS = "tools"
"""The column of a chat's tools."""

# Later code, rewards included, handles columns by recursion.
_DEEPEST = 100


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One row of a file: its prompt as the file has it, and the columns that rewards get."""

    identity: str
    """FILE:LINE, with lines counted from 1; FILE has only the folders that tell files apart."""
    path: Path
    line: int
    prompt: str | list[JSON]
    """Plain text, or chat messages."""
    columns: JSON
    completion: str | list[JSON] | None = None
    """Text or chat messages that follow the prompt in a demonstration; the preferred response of a pair."""
    rejected: str | list[JSON] | None = None
    """The other response of a pair."""

    def error(self, reason: str) -> InputError:
        """Make an error that names this row."""
        return _error(self.path, self.line, reason)


# The kinds of a chat's parts that are not text, each with the columns that hold such beside a prompt.
_MEDIA = {"image": ("image", "images"), "video": ("video", "videos"), "audio": ("audio", "audios")}

MakeRow = Callable[[Path, str, int, JSON, DataConfig, bool], Row]
"""Function that makes a row of a file's path, its name in identities, a line's number and its contents.

The last argument is true for the first row of the file.
"""


def read_rows(paths: Sequence[Path], config: DataConfig) -> list[Row]:
    """Read the rows of all files, in the order given."""
    return _read(paths, config, _row)


def read_demonstrations(paths: Sequence[Path], config: DataConfig) -> list[Row]:
    """Read rows that have a completion, or a whole chat whose first part is the prompt."""
    return _read(paths, config, _demonstration)


def read_pairs(paths: Sequence[Path], config: DataConfig) -> list[Row]:
    """Read rows that have two responses to a prompt, of which one was preferred."""
    return _read(paths, config, _pair)


def _read(paths: Sequence[Path], config: DataConfig, make: MakeRow) -> list[Row]:
    names = name_files(paths)
    return [row for path, name in zip(paths, names, strict=True) for row in _file_rows(path, name, config, make)]


def name_files(paths: Sequence[Path]) -> list[str]:
    """Name each file for identities: its own name, after the fewest folders that tell all files apart."""
    files = [os.path.realpath(path) for path in paths]
    # Names are hashed and sent as UTF-8, and a file's name need not be valid UTF-8.
    parts = [Path(os.fsencode(file).decode(errors="backslashreplace")).parts for file in files]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names


def _file_rows(path: Path, name: str, config: DataConfig, make: MakeRow) -> Iterator[Row]:
    num_rows = 0
    try:
        for line, content in _contents(path):
            num_rows += 1
            if not isinstance(content, dict):
                raise _error(
                    path,
                    line,
                    f"is {_kind(content)}, not an object; write an object with the key {config.prompt_key}",
                )
            _refuse_media(path, line, content)
            yield make(path, name, line, content, config, num_rows == 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    if num_rows == 0:
        raise InputError(f"{path} holds no row: write one prompt a row into it, or leave the file out")


def _contents(path: Path) -> Iterator[tuple[int, object]]:
    """Yield the contents of a file's rows, with their line numbers."""
    return _READERS[path.suffix.lower()](path)


def _jsonl(path: Path) -> Iterator[tuple[int, object]]:
    with path.open("rb") as file:
        for line, text in enumerate(file, start=1):
            if line == 1:
                text = text.removeprefix(codecs.BOM_UTF8)
            if not text.strip():
                continue
            try:
                content = msgspec.json.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise _error(path, line, f"is not JSON: {error}; write one object a line, in UTF-8") from None
            yield line, content


def _parquet(path: Path) -> Iterator[tuple[int, object]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise PlatformError(
            f"{path} is read with pyarrow, which is not installed: pip install pyarrow, or convert the file to JSONL"
        ) from None
    line = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_PARQUET_ROWS_AT_A_TIME):
                for content in batch.to_pylist():
                    line += 1
                    yield line, content
    except FileNotFoundError:
        raise
    except (ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path} cannot be read as Parquet: {reason}; write it again") from None


# The reader of each kind of file, by the ending of its name.
_READERS: Mapping[str, Callable[[Path], Iterator[tuple[int, object]]]] = dict(
    zip(ROW_FORMATS, (_jsonl, _parquet), strict=True)
)


def _row(path: Path, name: str, line: int, content: JSON, config: DataConfig, is_first: bool) -> Row:
    _require(path, line, content, config.prompt_key, "name the prompt's with --prompt-key", is_first)
    prompt = _checked_text(path, line, content[config.prompt_key], "prompt")
    return Row(f"{name}:{line}", path, line, prompt, _columns(path, line, content, config))


def _demonstration(path: Path, name: str, line: int, content: JSON, config: DataConfig, is_first: bool) -> Row:
    messages, completion = config.messages_key, config.completion_key
    if messages in content and completion in content:
        raise _error(
            path, line,
            f"has columns {messages} and {completion}, and must have one of them; name another column with "
            f"--messages-key or --completion-key",
        )  # fmt: skip
    if messages in content:
        prompt, answer = _divided_chat(path, line, content[messages])
        return Row(f"{name}:{line}", path, line, prompt, _keep_tools(content), answer)
    remedy = "name it with --completion-key, or a chat's with --messages-key"
    _require(path, line, content, completion, remedy, is_first)
    _require(path, line, content, config.prompt_key, "name the prompt's with --prompt-key", is_first)
    given = _checked_text(path, line, content[config.prompt_key], "prompt")
    follows = _checked_text(path, line, content[completion], "completion")
    if not isinstance(follows, str) and not any(message["role"] == ASSISTANT for message in follows):
        raise _error(
            path, line, f"has no message of the {ASSISTANT} in its completion; write one, or leave the row out"
        )
    return Row(f"{name}:{line}", path, line, given, _keep_tools(content), follows)


def _pair(path: Path, name: str, line: int, content: JSON, config: DataConfig, is_first: bool) -> Row:
    flags = {config.chosen_key: "--chosen-key", config.rejected_key: "--rejected-key"}
    for key, flag in flags.items():
        _require(path, line, content, key, f"name it with {flag}", is_first)
    responses = [_checked_text(path, line, content[key], f"{key} response") for key in flags]
    if responses[0] == responses[1]:
        raise _error(path, line, f"has the same text in {' and '.join(flags)}: nothing is preferred; leave the row out")
    chats = [response for response in responses if not isinstance(response, str)]
    if (given := content.get(config.prompt_key)) is not None:
        prompt = _checked_text(path, line, given, "prompt")
        if not isinstance(prompt, str) and all(chat[: len(prompt)] == prompt for chat in chats):
            chats = [chat[len(prompt) :] for chat in chats]
    else:
        if len(chats) < 2:
            _require(path, line, {}, config.prompt_key, "name the prompt's with --prompt-key", is_first)
        same = [one == other for one, other in zip(*chats, strict=False)]
        first = [*same, False].index(False)
        if first == 0:
            raise _error(path, line, "has no prompt, and two chats that share no first message; write the prompt")
        prompt, chats = chats[0][:first], [chat[first:] for chat in chats]
    for chat in chats:
        if [message["role"] for message in chat] != [ASSISTANT]:
            raise _error(
                path,
                line,
                f"has a response of {len(chat)} messages after the prompt, and needs one, of the {ASSISTANT}: write "
                "whole chats without a prompt (--prompt-key names another column), or leave the row out",
            )
    rest = iter(chats)
    chosen, rejected = (response if isinstance(response, str) else next(rest) for response in responses)
    return Row(f"{name}:{line}", path, line, prompt, _keep_tools(content), chosen, rejected)


def _keep_tools(content: JSON) -> JSON:
    """Return the column that a chat template writes into the prompt; others are not read."""
    return {TOOLS: content[TOOLS]} if content.get(TOOLS) else {}


def _divided_chat(path: Path, line: int, value: object) -> tuple[list[JSON], list[JSON]]:
    """Divide a chat before the assistant's first message."""
    if not isinstance(value, list):
        raise _error(path, line, f"has {_kind(value)} as its chat; write a list of messages")
    chat = _checked_text(path, line, value, "chat")
    assert not isinstance(chat, str)
    first = next((number for number, message in enumerate(chat) if message["role"] == ASSISTANT), None)
    if first is None:
        raise _error(path, line, f"has no message of the {ASSISTANT} in its chat; write one, or leave the row out")
    return chat[:first], chat[first:]


def _require(path: Path, line: int, content: JSON, key: str, remedy: str, is_first: bool) -> None:
    """Raise an InputError unless the row has the column."""
    if key not in content:
        # If earlier rows have the column, the fault is in the row and not in the flag.
        remedy = remedy if is_first else "correct the row, or leave it out"
        near = suggest_nearest(key, content) or f" (it has {', '.join(content) or 'no column'})"
        raise _error(path, line, f"has no column {key}{near}; {remedy}")


def _columns(path: Path, line: int, content: JSON, config: DataConfig) -> JSON:
    """Return the columns of a row that rewards get; they get its prompt separately."""
    key = config.answer_key
    if key != ANSWER:
        if key not in content:
            near = suggest_nearest(key, content) or f" (it has {', '.join(content)})"
            raise _error(path, line, f"has no column {key}{near}, which --answer-key names; correct the flag")
        if ANSWER in content and config.prompt_key != ANSWER:
            raise _error(
                path, line,
                f"has columns {ANSWER} and {key}, and with --answer-key {key} both would be {ANSWER}; leave the flag "
                f"out and give the reward the column's name (as in --reward gsm8k:{key})",
            )  # fmt: skip
    columns = {ANSWER if name == key else name: value for name, value in content.items() if name != config.prompt_key}
    for name in GIVEN:
        if name in columns:
            raise _error(path, line, f"has a column {name}, and rewards get their own {name}; rename the column")
    for name, value in content.items():
        reason = _not_json(value)
        if reason:
            raise _error(path, line, f"holds {reason} in column {name}; write it as text, or leave the column out")
    return columns


def _not_json(value: object, depth: int = 0) -> str | None:
    """Name a part of a value that JSON cannot express or the wire cannot carry; None if there is none."""
    if value is None or isinstance(value, str | bool):
        return None
    if isinstance(value, int):
        return None if -(2**63) <= value < 2**64 else f"{value}, which has more than 64 bits,"
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{value}, which JSON has no number for,"
    if isinstance(value, dict | list) and depth == _DEEPEST:
        return f"lists and objects that are nested more than {_DEEPEST} deep"
    if isinstance(value, dict):
        wrong = next((name for name in value if not isinstance(name, str)), None)
        return _first(value.values(), depth) if wrong is None else f"the name {wrong!r}, which must be text,"
    if isinstance(value, list):
        return _first(value, depth)
    return f"{_kind(value)}, which JSON does not have,"


def _first(values: Any, depth: int) -> str | None:
    return next((reason for value in values if (reason := _not_json(value, depth + 1))), None)


def _checked_text(path: Path, line: int, value: object, what: str) -> str | list[JSON]:
    """Return the value if it is text or a list of messages, else raise; `what` names its purpose in errors."""
    if isinstance(value, str):
        if not value:
            raise _error(path, line, f"has an empty {what}; write one, or leave the row out")
        return value
    if not isinstance(value, list):
        raise _error(path, line, f"has {_kind(value)} as its {what}; write text, or a list of chat messages")
    if not value:
        raise _error(path, line, f"has a {what} without a message; write one, or leave the row out")
    for number, message in enumerate(value, start=1):
        if (kind := _find_media(message)) is not None:
            raise _error(
                path, line,
                f"has {kind} in message {number} of its {what}, and models are trained on text alone; write the "
                "message as text, or leave the row out",
            )  # fmt: skip
        for key in ("role", "content"):
            text = message.get(key) if isinstance(message, dict) else None
            if not isinstance(text, str):
                raise _error(
                    path, line,
                    f"has {_kind(text if isinstance(message, dict) else message)} where message {number} of its "
                    f'{what} needs text as its {key}; write {{"role": "user", "content": "..."}}',
                )  # fmt: skip
    return value


def _find_media(message: object) -> str | None:
    """Name an image, a video or a sound among the parts of a chat message; None if there is none."""
    parts = message.get("content") if isinstance(message, dict) else None
    for part in parts if isinstance(parts, list) else ():
        if not isinstance(part, dict):
            continue
        for media, columns in _MEDIA.items():
            if media in str(part.get("type")) or any(part.get(column) for column in columns):
                return f"a part of the kind {media!r}"
    return None


def _refuse_media(path: Path, line: int, content: JSON) -> None:
    """Raise an InputError if the row has images, videos or sounds beside its prompt."""
    for columns in _MEDIA.values():
        for column in columns:
            if content.get(column):
                raise _error(
                    path, line,
                    f"has something in column {column}, and models are trained on text alone; rename the column if "
                    "rewards read it, or leave the row out",
                )  # fmt: skip


def _kind(value: object) -> str:
    """Name the type of a value, for errors."""
    named = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list"}
    return named.get(type(value)) or ("an object" if isinstance(value, dict) else f"a {type(value).__name__} value")


def _error(path: Path, line: int, reason: str) -> InputError:
    return InputError(f"{path}:{line} {reason}")
