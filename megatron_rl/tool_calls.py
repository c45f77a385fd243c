"""Tools that the policy calls: their schemas, and the parts of a turn of the policy: text, reasoning and calls.

Tools are the public methods of an object, each with its signature and its docstring in Google's style.
"""

import dataclasses
import inspect
from collections.abc import Collection, Sequence
from typing import Any, Protocol

JSON = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ToolCall:
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


def list_methods(instance: object, others: Collection[str]) -> list[str]:
    """List the public methods of an object's class by name, without `others`."""
    # On the class: a look at the object would compute its properties.
    members = inspect.getmembers(type(instance), predicate=inspect.isfunction)
    return [name for name, _ in members if not name.startswith("_") and name not in others]


def describe_methods(instance: object, names: Collection[str]) -> list[JSON]:
    """Describe methods as chat templates want tools; raise a TypeError that names one that cannot be described."""
    if not names:
        return []
    # Imported here: it takes a second.
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    schemas: list[JSON] = []
    for name in names:
        method: Any = getattr(instance, name)
        try:
            schemas.append(get_json_schema(method))
        except (DocstringParsingException, TypeHintParsingException) as error:
            raise TypeError(
                f"{type(instance).__name__}.{name} is a tool, as all public methods are, and cannot be described: "
                f"{error}; give its parameters types, and describe it and them in a docstring with Args:, or begin "
                "its name with an underscore"
            ) from None
    return schemas
