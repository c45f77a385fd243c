"""The parts of a turn of the policy: text, reasoning and calls of tools."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

JSON = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a tool, as the policy wrote it."""

    id: str
    """The call's name in its conversation; the same for the same turn of the policy."""
    name: str
    """The tool's name."""
    arguments: str
    """The arguments as the text of a JSON object, as in OpenAI's interface; it may not be one."""


@dataclasses.dataclass(frozen=True)
class Said:
    """A turn of the policy, in its parts."""

    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]


class Reader(Protocol):
    """Reads turns of the policy."""

    async def read(self, tokens: Sequence[int], text: str, tools: Sequence[JSON]) -> Said:
        """Read a turn; `text` is that of its tokens without special ones, and `tools` are the schemas it had."""


class PlainReader:
    """Reads no calls: all text is content."""

    async def read(self, tokens: Sequence[int], text: str, tools: Sequence[JSON]) -> Said:
        return Said(text, None, ())
