"""Writes some responses of each iteration as text, so that a person can read what the metrics stand for."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megatron_rl.observe.metrics import plain
from megatron_rl.shared.records.append_file import LineFile

FILE_NAME = "samples.jsonl"


@dataclasses.dataclass(frozen=True)
class SampledTokens:
    """The tokens of a response, and their log-probs at the temperature of sampling."""

    texts: Sequence[str]
    """The text of each token by itself: a letter that several tokens share is in none of them."""
    engine: Sequence[float]
    trainer: Sequence[float] | None
    """The trainer's log-probs; None in an evaluation."""


@dataclasses.dataclass(frozen=True)
class SampledPlace:
    """The place in a conversation that a branch leaves: after some turn, or within it."""

    turn: int
    """Number of the turn, from 0; -1 for the prompt."""
    num_tokens: int | None = None
    """The first tokens of the turn, if the branch leaves within it."""


@dataclasses.dataclass(frozen=True)
class SampledTurn:
    """A turn of the policy or of the environment."""

    by: Literal["policy", "environment"]
    text: str
    num_tokens: int = 0
    reward: float | None = None
    """The reward of a turn of the policy; None if turns have none."""
    after: SampledPlace | None = None
    """The place that it follows, if it begins a branch; None if it follows the turn before it."""
    advantage: float | None = None
    """The advantage of a turn of the policy; None without --grpo-turn-credit."""


@dataclasses.dataclass(frozen=True)
class SampledResponse:
    """A response as text, its reward, and the value of each reward function."""

    text: str
    reward: float | None
    """None if it is not scored."""
    components: Mapping[str, float] = dataclasses.field(default_factory=dict)
    num_tokens: int = 0
    finish_reason: str = ""
    failure: str = ""
    """The reason why its environment or agent failed."""
    advantage: float | None = None
    """None in an evaluation, if it follows from the whole update, or if its turns have advantages of their own."""
    tokens: SampledTokens | None = None
    """Its tokens; None without --log-sample-tokens."""
    turns: Sequence[SampledTurn] | None = None
    """Its turns; None if it is one turn of the policy."""


@dataclasses.dataclass(frozen=True)
class SampledGroup:
    """A prompt, the name of its row in the data set, and some of the responses to it."""

    row: str
    prompt: str
    responses: Sequence[SampledResponse]


# The purpose for which a group was sampled.
Kind = Literal["training", "evaluation"]


class SamplesFile(LineFile):
    """The samples of a run, at most `limit` responses of each kind per iteration; `LineFile` resumes it."""

    def __init__(self, path: Path, limit: int) -> None:
        super().__init__(path)
        self.limit = limit
        self._written: dict[Kind, tuple[int, int]] = {}

    def left(self, version: int, kind: Kind = "training") -> int:
        """Return how many more responses of this iteration are taken; further ones need not be decoded."""
        last, num_written = self._written.get(kind, (None, 0))
        return self.limit - num_written if version == last else self.limit

    def restart(self, version: int) -> int:
        self._written = {}
        return super().restart(version)

    def write(self, version: int, groups: Iterable[SampledGroup], kind: Kind = "training") -> None:
        """Append a line per group, in order, until the iteration's limit is reached; the rest is not written."""
        for group in groups:
            responses = group.responses[: self.left(version, kind)]
            if not responses:
                return
            self.append(version, {"kind": kind, **_record(group, responses)})
            self._written[kind] = (version, self.limit - self.left(version, kind) + len(responses))


def _record(group: SampledGroup, responses: Sequence[SampledResponse]) -> dict[str, Any]:
    nonfinite: list[str] = []
    sampled = [dataclasses.asdict(response) for response in responses]
    for response in sampled:
        for name in ("tokens", "turns", "failure"):
            if not response[name]:
                del response[name]
        for turn in response.get("turns", ()):
            for name in ("reward", "after", "advantage"):
                if turn[name] is None:
                    del turn[name]
    record = {"row": group.row, "prompt": group.prompt, "responses": plain(sampled, "responses", nonfinite)}
    return {**record, "nonfinite": nonfinite} if nonfinite else record
