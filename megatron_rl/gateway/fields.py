"""The fields of requests, each checked by name: what would change the sampled policy is refused."""

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from megatron_rl.gateway.said import MODEL, Advice, CallRefused, Serving
from megatron_rl.tool_calls import JSON, Said

# Fields that change the distribution of what is sampled, with the values that do not.
SAMPLING: dict[str, tuple[Any, ...]] = {
    "top_p": (1,), "top_k": (-1, 0), "min_p": (0,), "frequency_penalty": (0,), "presence_penalty": (0,),
    "repetition_penalty": (1,), "logit_bias": ({},), "reasoning_effort": (), "verbosity": (),
}  # fmt: skip
_ADVISE = "or start the run with --rollout-gateway-advise, which makes it advice"
# The settings of frameworks that send a parameter.
_SETTINGS = {
    "temperature": "in langchain leave out ChatOpenAI's temperature",
    "tool_choice": "in smolagents OpenAIModel(..., tool_choice='auto') does, in instructor mode=Mode.MD_JSON; in "
    "pydantic-ai leave out output_type",
}
_KINDS = {str: "text", int: "a whole number", bool: "true or false", list: "a list", dict: "an object"}


class Refusals:
    """The refusals of a request's parts, which are reported together: a client corrects them at once."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.advice: list[Advice] = []
        """Requests that are advice."""
        self._refused: list[CallRefused] = []
        self._has_advisable = False

    def advise(self, advice: Advice, reason: str) -> None:
        """Take a request that would change the policy as advice, or refuse it for this reason."""
        if self.serving.advises:
            self.advice.append(advice)
            return
        self._has_advisable = True
        setting = _SETTINGS.get(advice.parameter)
        told = reason if setting is None else f"{reason} ({setting})"
        self._refused.append(CallRefused(told, parameter=advice.parameter))

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
            if name in read or name in ignored or value is None:
                continue
            if name in SAMPLING:
                if value not in SAMPLING[name]:
                    self.advise(Advice(name), f"{name} {value!r} would sample from another policy: leave it out")
                continue
            self.read(_check_field, name, value, neutral)

    def check_temperature(self, body: JSON) -> None:
        value, of_run = body.get("temperature"), self.serving.temperature
        if value is not None and value != of_run:
            self.advise(
                Advice("temperature"), f"temperature {value!r} is not the run's: leave it out, or write {of_run:g}"
            )

    def read_choice(self, choice: Any, tools: list[JSON]) -> list[JSON]:
        """Return the tools that a turn has by OpenAI's `tool_choice`; a choice that is forced is advice."""
        kind = choice.get("type") if isinstance(choice, dict) else choice
        if kind in (None, "auto"):
            return tools
        if kind == "none":
            return []
        named = None
        if isinstance(choice, dict):
            named = take(take(choice, "function", dict, "tool_choice.") or choice, "name", str, "tool_choice.")
        if kind in ("required", "any", "function", "tool") and (named or kind in ("required", "any")):
            which = f"the tool {named}" if named else "one of the tools"
            self.advise(
                Advice("tool_choice", f"Answer with a call of {which}.", lambda said: _has_call(said, named)),
                f"tool_choice {choice!r} would force what the policy says: leave it out, or write 'auto' or 'none'",
            )
            return tools
        raise CallRefused(f"tool_choice {choice!r} is not known here: leave it out", parameter="tool_choice")

    def read_parallel(self, is_parallel: Any) -> None:
        """Read whether a turn may have several calls."""
        if is_parallel is False:
            self.advise(
                Advice("parallel_tool_calls", "Call at most one tool.", lambda said: len(said.tool_calls) < 2),
                "parallel_tool_calls False would force what the policy says: leave it out",
            )

    def read_format(self, form: Any, parameter: str) -> None:
        """Read the format of an answer, in OpenAI's form: JSON is advice."""
        if form is None or form == {"type": "text"}:
            return
        kind = form.get("type") if isinstance(form, dict) else None
        if kind not in ("json_object", "json_schema"):
            raise CallRefused(f"{parameter} {form!r:.200} is not known here: leave it out", parameter=parameter)
        schema = (take(form, "json_schema", dict, f"{parameter}.") or form).get("schema")
        said = f" that fits this schema: {json.dumps(schema)}" if schema else ""
        self.advise(
            Advice(parameter, f"Answer with JSON alone{said}.", _is_json),
            f"{parameter} {kind!r} would force what the policy says: leave it out",
        )

    def raise_all(self) -> None:
        """Raise one refusal that lists all."""
        if not self._refused:
            return
        first, *others = self._refused
        if not others and not self._has_advisable:
            raise first
        reasons = "; ".join(map(str, [*self._refused, *([_ADVISE] if self._has_advisable else [])]))
        many = f"{len(self._refused)} parts are refused: " if others else ""
        raise CallRefused(f"{many}{reasons}", first.status, first.code, first.parameter)


def _has_call(said: Said, name: str | None) -> bool:
    return any(name in (None, call.name) for call in said.tool_calls)


def _is_json(said: Said) -> bool:
    """Check for JSON; not for the schema, which is the client's and may refer to the network or take for ever."""
    try:
        json.loads(said.content)
    except (ValueError, RecursionError):
        return False
    return True


def take_stop(body: JSON, name: str) -> tuple[str, ...]:
    """Return the texts before which an answer is to end."""
    value = body.get(name) or []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise CallRefused(f"{name} must be text or a list of texts, and is {value!r:.100}", parameter=name)
    return tuple(filter(None, texts))


def _check_field(name: str, value: Any, neutral: Mapping[str, tuple]) -> None:
    if name not in neutral:
        raise CallRefused(f"{name} is not known here: leave it out", parameter=name)
    if value not in neutral[name]:
        also = f", or write {neutral[name][0]!r}" if neutral[name] else ""
        raise CallRefused(f"{name} {value!r:.200} is not served: leave it out{also}", parameter=name)


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


def read_text(content: Any, place: str, joint: str, parts: str, kinds: Collection[str] = ("text",)) -> str | None:
    """Return a content that is text, or a list of parts that are text; None without it."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise CallRefused(f"{place} must be text or a list of {parts}", parameter="messages")
    texts = []
    for number, block in enumerate(list_objects(content, place)):
        if block.get("type") not in kinds:
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
