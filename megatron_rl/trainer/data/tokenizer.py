"""The tokenizer of the model and its chat template, which make prompts of rows, with checks of their output."""

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.settings import DataConfig
from megatron_rl.errors import InputError, PlatformError
from megatron_rl.shared.chat import ChatWriter
from megatron_rl.shared.protocol.wire import JSON, Prompt, encode_tokens
from megatron_rl.shared.weights.end_tokens import read_end_tokens
from megatron_rl.shared.weights.families import find_image_tokens
from megatron_rl.trainer.data.prompt_files import ASSISTANT, TOOLS, Row

_ROWS_AT_A_TIME = 1024


# A marker for an answer, which no template writes by itself.
_ANSWER = "megatronrl0answer"


def load_tokenizer(folder: Path, flag: str = "--hf-model") -> Any:
    """Load the tokenizer of a Hugging Face folder, without using the network or running code of the folder."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise PlatformError(f"prompts are tokenized with transformers: {error}; install transformers") from None
    if not folder.is_dir():
        raise InputError(f"{flag} {folder} must be a folder: write the folder of model and tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    # Many libraries take part in reading a tokenizer's files, and any of them may raise its own exceptions.
    except Exception as error:
        raise InputError(
            f"{flag} {folder}: its tokenizer cannot be loaded: {_one_line(error)}; put the model's tokenizer "
            f"files into the folder"
        ) from None
    # Some tokenizer classes load without their files, and then know only their special tokens.
    if not set(tokenizer.get_vocab()) - set(tokenizer.get_added_vocab()) - set(tokenizer.all_special_tokens):
        raise InputError(
            f"{flag} {folder} does not hold a tokenizer's vocabulary: put the model's tokenizer files into the "
            f"folder (tokenizer.json, or vocab.json with merges.txt, or tokenizer.model; and tokenizer_config.json)"
        )
    return tokenizer


@dataclasses.dataclass(frozen=True)
class PromptTokenizer:
    """Makes prompts of rows. The tokenizer adds special tokens to text; in a chat the template writes them."""

    folder: Path
    tokenizer: Any
    vocab_size: int
    config: DataConfig
    is_left_open: bool = False
    """Chats end with the content of their last message: an environment may add to it before the policy's turn."""
    tools: Sequence[JSON] = ()
    """Schemas of the tools that an environment offers; chats tell the policy of them."""

    @classmethod
    def load(
        cls,
        folder: Path,
        vocab_size: int,
        config: DataConfig,
        is_left_open: bool = False,
        tools: Sequence[JSON] = (),
    ) -> "PromptTokenizer":
        """Make prompts with the tokenizer of the policy's folder."""
        return cls(folder, load_tokenizer(folder), vocab_size, config, is_left_open, tools)

    @property
    def end_of_text(self) -> int | None:
        """Token that ends a response to text; None if the tokenizer has none."""
        return self.tokenizer.eos_token_id

    @functools.cached_property
    def end_of_turn(self) -> int | None:
        """Token that ends a response in a chat: the template's first special token after an answer.

        None without such a token or without a template.
        """
        messages = [{"role": "user", "content": "?"}, {"role": ASSISTANT, "content": _ANSWER}]
        if self.config.system_message is not None:
            messages.insert(0, {"role": "system", "content": self.config.system_message})
        try:
            written: str = self.tokenizer.apply_chat_template(messages, tokenize=False)
        # A template is a program: its faults are reported with the row that it refuses.
        except Exception:
            return None
        _, found, after = written.rpartition(_ANSWER)
        if not found or not after:
            return None
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        special.discard(self.tokenizer.unk_token_id)
        return next((token for token in self.encode([after], False)[0].tolist() if token in special), None)

    def find_stops(self, texts: Iterable[str | list[JSON]], notes: list[str]) -> list[int]:
        """Return the tokens that end responses to these prompts but that the model's files do not list as ends.

        If there are any, add a note.
        """
        end = self.end_of_turn if any(not isinstance(text, str) for text in texts) else None
        if end is None or end in (listed := read_end_tokens(self.folder)):
            return []
        known = ", ".join(f"{self.tokenizer.convert_ids_to_tokens(token)} ({token})" for token in listed) or "none"
        notes.append(
            f"the chat template ends a turn with {self.tokenizer.convert_ids_to_tokens(end)} ({end}), and config.json "
            f"and generation_config.json of {self.folder} list other ends of a response ({known}): responses to chats "
            f"end with either, and --save-hf lists both in generation_config.json"
        )
        return [end]

    def prompts(self, rows: Sequence[Row]) -> Iterator[Prompt]:
        """Yield the rows as prompts, in their order, each with index 0."""
        for start in range(0, len(rows), _ROWS_AT_A_TIME):
            batch = rows[start : start + _ROWS_AT_A_TIME]
            texts = [self.text(row) for row in batch]
            for row, text, tokens in zip(batch, texts, self._tokens(batch, texts), strict=True):
                yield Prompt(index=0, row=row.identity, tokens=encode_tokens(tokens), text=text, columns=row.columns)

    def text(self, row: Row) -> str | list[JSON]:
        """Return the prompt as the model gets it: text, or all messages of a chat."""
        system = self.config.system_message
        if isinstance(row.prompt, str) and not self.config.chat:
            if system is not None:
                raise row.error(
                    "has plain text as its prompt, and --prompt-system-message is for chats; add --prompt-chat"
                )
            if self.tools:
                raise row.error(
                    "has plain text as its prompt, and the tools of --rollout-env are for chats; add --prompt-chat"
                )
            return row.prompt
        messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        if system is None:
            return messages
        if any(message["role"] == "system" for message in messages):
            raise row.error("has a system message of its own; leave out --prompt-system-message")
        return [{"role": "system", "content": system}, *messages]

    def _tokens(self, rows: Sequence[Row], texts: Sequence[str | list[JSON]]) -> list[np.ndarray]:
        tokens: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * len(rows)
        plain = [number for number, text in enumerate(texts) if isinstance(text, str)]
        chats = [number for number, text in enumerate(texts) if not isinstance(text, str)]
        # A template's output already has its special tokens.
        for numbers, written, adds_special_tokens in (
            (plain, [texts[number] for number in plain], True),
            (chats, [self.render(rows[number], texts[number]) for number in chats], False),
        ):
            for number, sequence in zip(numbers, self.encode(written, adds_special_tokens), strict=True):
                tokens[number] = sequence
        self._check(rows, tokens)
        return tokens

    def encode(self, texts: Sequence[Any], adds_special_tokens: bool) -> list[np.ndarray]:
        if not texts:
            return []
        ids = self.tokenizer(
            list(texts), add_special_tokens=adds_special_tokens, return_attention_mask=False,
            return_token_type_ids=False, verbose=False,
        )["input_ids"]  # fmt: skip
        return [np.asarray(sequence, dtype=np.int64) for sequence in ids]

    def render(self, row: Row, messages: str | list[JSON], is_open: bool = True) -> str:
        """Write the row's messages with the chat template; `is_open` opens the assistant's turn after them."""
        tools = self._find_tools(row)
        try:
            self.tokenizer.get_chat_template()
        except ValueError:
            raise row.error(
                f"is a chat, and the tokenizer of --hf-model {self.folder} has no chat template; take a model that has "
                f"one, or give plain text without --prompt-chat"
            ) from None
        try:
            if self.is_left_open and not isinstance(messages, str):
                return ChatWriter(self.tokenizer).write_prompt(messages, tools)[0]
            rendered: str = self.tokenizer.apply_chat_template(
                messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=is_open
            )
        # A template is a program: it may refuse a chat with its own error, or fail with any exception.
        except Exception as error:
            raise row.error(
                f"is a chat that the chat template refuses: {_one_line(error)}; correct its messages"
            ) from None
        return rendered

    def _find_tools(self, row: Row) -> Sequence[JSON]:
        """Return the tools that the row's chat offers: its own, or those of the environment."""
        column = row.columns.get(TOOLS)
        if not column:
            return self.tools
        if self.tools:
            raise row.error(f"has a column {TOOLS}, and --rollout-env offers tools itself; rename the column")
        try:
            tools = json.loads(column) if isinstance(column, str) else column
            functions = [(tool["type"], tool["function"]["name"]) for tool in tools]
            is_right = isinstance(tools, list) and all(
                kind == "function" and isinstance(name, str) for kind, name in functions
            )
        except (ValueError, TypeError, KeyError):
            is_right = False
        if not is_right:
            raise row.error(
                f"has a column {TOOLS} that is not OpenAI's list of functions, such as "
                '[{"type": "function", "function": {"name": "add", "parameters": {...}}}]; correct it, or rename the '
                "column"
            )
        try:
            ChatWriter(self.tokenizer).check_tools(tools)
        except InputError:
            raise row.error(f"has a column {TOOLS}, and the chat template writes no tools; rename the column") from None
        return tools

    def _check(self, rows: Sequence[Row], tokens: Sequence[np.ndarray]) -> None:
        for row, sequence in zip(rows, tokens, strict=True):
            if not len(sequence):
                raise row.error("has a prompt without tokens; write one, or leave the row out")
        for row, sequence in zip(rows, tokens, strict=True):
            self.check_vocabulary(row, sequence)

    @functools.cached_property
    def _image_tokens(self) -> dict[int, str]:
        """Tokens that stand for images in a prompt, or enclose them, each with its key of config.json."""
        return find_image_tokens(self.folder) if (self.folder / "config.json").exists() else {}

    def check_vocabulary(self, row: Row, tokens: np.ndarray) -> None:
        """Raise an InputError that names the row if one of its tokens cannot be trained on.

        Such a token is outside the model's vocabulary, or stands for an image.
        """
        if found := sorted(self._image_tokens.keys() & {*tokens.tolist()} if self._image_tokens else ()):
            raise row.error(
                f"has token {found[0]}, which stands for images ({self._image_tokens[found[0]]} in "
                f"{self.folder / 'config.json'}), and models are trained on text alone; leave the row out"
            )
        if tokens.max(initial=0) >= self.vocab_size:
            raise row.error(
                f"has token {tokens.max()}, and the model's vocabulary ends at {self.vocab_size - 1}; the "
                f"tokenizer in {self.folder} belongs to another model: put the right one there"
            )


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
