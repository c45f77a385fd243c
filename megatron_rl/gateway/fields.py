"""The fields of requests, each checked by name: what would change the sampled policy is refused."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from megatron_rl.gateway.said import MODEL, CallRefused
from megatron_rl.tool_calls import JSON

_KINDS = {str: "text", int: "a whole number", bool: "true or false", list: "a list", dict: "an object"}


class Refusals:
    """The refusals of a request's parts, which are reported together: a client corrects them at once."""

    def __init__(self) -> None:
        self._refused: list[CallRefused] = []

    def read(self, read: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function reads; None if it refuses."""
        try:
            return read(*arguments)
        except CallRefused as refused:
            self._refused.append(refused)
            return None

    def check_fields(
        self, body: JSON, read: Collection[str], ignored: Collection[str], neutral: Mapping[str, tuple]
    ) -> None:
        """Refuse fields that are unknown, and fields that would change the policy.

        `read` has the fields that are used, `ignored` the fields that change nothing that is sampled, and `neutral` the
        values that leave the policy as it is.
        """
        for name, value in body.items():
            if name not in read and name not in ignored:
                self.read(_check_field, name, value, neutral)

    def raise_all(self) -> None:
        """Raise one refusal that lists all."""
        match self._refused:
            case []:
                return
            case [refused]:
                raise refused
            case [first, *_]:
                reasons = "; ".join(map(str, self._refused))
                raise CallRefused(f"{len(self._refused)} parts are refused: {reasons}", parameter=first.parameter)


def _check_field(name: str, value: Any, neutral: Mapping[str, tuple]) -> None:
    if name not in neutral:
        raise CallRefused(f"{name} is not known here: leave it out", parameter=name)
    if value not in neutral[name]:
        allowed = next((value for value in neutral[name] if value is not None), None)
        also = "" if allowed is None else f", or write {allowed!r}"
        raise CallRefused(
            f"{name} {value!r} would sample from another policy than the one that is trained: leave it out{also}",
            parameter=name,
        )


def check_temperature(body: JSON, temperature: float) -> None:
    given = body.get("temperature")
    if given is not None and given != temperature:
        raise CallRefused(
            f"temperature {given!r} is not the run's, {temperature:g}: leave it out, or write {temperature:g}",
            parameter="temperature",
        )


def check_model(body: JSON) -> None:
    given = body.get("model")
    if given != MODEL:
        raise CallRefused(f"model {given!r} is not served: write {MODEL!r}", 404, "model_not_found", "model")


def take(body: JSON, name: str, kind: type, place: str = "") -> Any:
    """Return a field of this type; None if it is missing or null."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise CallRefused(f"{place}{name} must be {_KINDS[kind]}, and is {value!r:.100}", parameter=name)
    return value


def need(body: JSON, name: str, kind: type, place: str = "") -> Any:
    """Return a field of this type that must be there."""
    value = take(body, name, kind, place)
    if value is None:
        raise CallRefused(f"{place}{name} is missing: it must be {_KINDS[kind]}", parameter=name)
    return value


def take_bound(body: JSON, *names: str) -> int | None:
    """Return the least of these bounds of a turn's tokens; None if none is given."""
    given = [value for name in names if (value := take(body, name, int)) is not None]
    if given and min(given) < 1:
        raise CallRefused(f"{names[0]} {min(given)} must be at least 1", parameter=names[0])
    return min(given, default=None)


def list_objects(values: list[Any], place: str) -> list[JSON]:
    """Return a list whose entries must be objects."""
    for number, value in enumerate(values):
        if not isinstance(value, dict):
            raise CallRefused(f"{place}[{number}] must be an object, and is {value!r:.100}", parameter=place)
    return values


def read_text(content: Any, place: str, joint: str, parts: str) -> str | None:
    """Return a content that is text, or a list of parts that are text; None without it."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise CallRefused(f"{place} must be text or a list of {parts}", parameter="messages")
    texts = []
    for number, block in enumerate(list_objects(content, place)):
        if block.get("type") != "text":
            raise CallRefused(
                f"{place}[{number}] has the type {block.get('type')!r}, and the policy reads text alone",
                parameter="messages",
            )
        texts.append(need(block, "text", str, f"{place}[{number}]."))
    return joint.join(texts)


def check_end(messages: list[JSON]) -> list[JSON]:
    """Return the messages; refuse a chat that is empty, or that the policy would continue in its last message."""
    if not messages:
        raise CallRefused("messages must have at least one message", parameter="messages")
    if messages[-1]["role"] == "assistant":
        raise CallRefused(
            "the last message is the assistant's, and a turn that has begun is not continued: end with another",
            parameter="messages",
        )
    return messages
