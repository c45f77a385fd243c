"""The segments of groups: what is the same for several continuations stands in the buffer once.

A prompt is followed by its responses, and a response by its branches. What environments wrote alike at the begin of
several responses of a group, such as the tools of a chat, is one segment too. Tokens of the policy never are: each is
a target of its own.

A strand is a range of tokens without a branch: a prompt, a begin that several parts share, or the rest of a part.
Segments are what is left of strands where others follow from amid them.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from megatron_rl.ops.shared_prompt.layout import ROOT
from megatron_rl.shared.protocol.turns import ResponsePart, trace_path

Tokens = Sequence[int] | np.ndarray


@dataclasses.dataclass(frozen=True)
class Segment:
    tokens: Tokens
    parent: int
    response: int | None = None
    """The number of the response whose targets it has, if it may have any."""
    mask: np.ndarray | None = None
    """True for each of its tokens that is a target; None if all are."""


@dataclasses.dataclass(frozen=True)
class Branching:
    """A response that branches, or that environments wrote parts of."""

    tokens: np.ndarray
    mask: np.ndarray
    """True for each token that the policy sampled."""
    parts: Sequence[ResponsePart]


@dataclasses.dataclass
class _Strand:
    tokens: np.ndarray
    after: "_Point | None"
    response: int | None = None
    mask: np.ndarray | None = None
    cuts: set[int] = dataclasses.field(default_factory=set)
    """The numbers of its first tokens that others follow."""
    segments: dict[int, int] = dataclasses.field(default_factory=dict)
    """The segment that ends at each cut."""


@dataclasses.dataclass(frozen=True)
class _Point:
    """The place after the first `offset` tokens of a strand."""

    strand: _Strand
    offset: int


@dataclasses.dataclass(frozen=True)
class _Opening:
    """The words of environments at the begin of a part, as far as they have no strand yet."""

    response: int
    part: int
    tokens: np.ndarray


class _Strands:
    """The strands of a group, before they are segments."""

    def __init__(self, prompt: Tokens, responses: Sequence[Branching], first: int) -> None:
        self._prompt = _Strand(np.asarray(prompt), None)
        self._responses = responses
        self._first = first
        self._shared: list[_Strand] = []
        # For each part, the strands of its tokens, and the token of the response with which each begins.
        self._found: list[list[list[tuple[int, _Strand]]]] = [[[] for _ in one.parts] for one in responses]

    def list_strands(self) -> list[_Strand]:
        self._share_begins()
        own = [
            self._add_rest(number, part)
            for number, response in enumerate(self._responses)
            for part in range(len(response.parts))
        ]
        points = [strand.after for strand in (*self._shared, *own) if strand.after is not None]
        # What no response follows is not computed.
        last = max((point.offset for point in points if point.strand is self._prompt), default=0)
        self._prompt.tokens = self._prompt.tokens[:last]
        return [self._prompt, *self._shared, *own]

    def _share_begins(self) -> None:
        """Make strands of what several parts that follow the same token of the prompt begin with."""
        begins: dict[int, list[_Opening]] = {}
        for number, response in enumerate(self._responses):
            for place, part in enumerate(response.parts):
                if part.after <= 0:
                    begin = response.tokens[part.start : part.start + _count_given(response, part)]
                    begins.setdefault(part.after, []).append(_Opening(number, place, begin))
        for after, of_place in begins.items():
            self._divide(self._place_in_prompt(after), of_place)

    def _divide(self, point: _Point | None, begins: Sequence[_Opening]) -> None:
        by_token: dict[int, list[_Opening]] = {}
        for begin in begins:
            if len(begin.tokens):
                by_token.setdefault(int(begin.tokens[0]), []).append(begin)
        for alike in by_token.values():
            if len(alike) > 1:
                length = _count_common([begin.tokens for begin in alike])
                strand = _Strand(alike[0].tokens[:length], point)
                self._shared.append(strand)
                for begin in alike:
                    found = self._found[begin.response][begin.part]
                    part = self._responses[begin.response].parts[begin.part]
                    found.append((part.start + sum(len(before.tokens) for _, before in found), strand))
                rest = [dataclasses.replace(begin, tokens=begin.tokens[length:]) for begin in alike]
                self._divide(_Point(strand, length), rest)

    def _add_rest(self, number: int, place: int) -> _Strand:
        """Make the strand of what a part has to itself."""
        response, found = self._responses[number], self._found[number][place]
        part = response.parts[place]
        begin = part.start + sum(len(strand.tokens) for _, strand in found)
        if found:
            point: _Point | None = _Point(found[-1][1], len(found[-1][1].tokens))
        elif part.after > 0:
            point = self._place_in_response(number, part.after)
        else:
            point = self._place_in_prompt(part.after)
        own = slice(begin, part.end)
        strand = _Strand(response.tokens[own], point, self._first + number, response.mask[own])
        found.append((begin, strand))
        return strand

    def _place_in_prompt(self, after: int) -> _Point | None:
        offset = len(self._prompt.tokens) + after
        return _Point(self._prompt, offset) if offset else None

    def _place_in_response(self, number: int, after: int) -> _Point:
        for part, found in zip(self._responses[number].parts, self._found[number], strict=True):
            if part.start < after <= part.end:
                begin, strand = next(one for one in reversed(found) if one[0] < after)
                return _Point(strand, after - begin)
        raise AssertionError(f"token {after - 1} belongs to no part")


def lay_out_groups(groups: Sequence[tuple[Tokens, Sequence[Branching]]]) -> list[Segment]:
    """Lay out each group, first its prompt and then its responses, in their order."""
    segments: list[Segment] = []
    num_responses = 0
    for prompt, responses in groups:
        segments += _cut(_Strands(prompt, responses, num_responses).list_strands(), len(segments))
        num_responses += len(responses)
    return segments


def separate_parts(groups: Sequence[tuple[Tokens, Sequence[Branching]]]) -> list[Segment]:
    """Lay out each part of each response after its own copy of all that it follows."""
    segments: list[Segment] = []
    responses = ((np.asarray(prompt), response) for prompt, of_prompt in groups for response in of_prompt)
    for number, (prompt, response) in enumerate(responses):
        whole = np.concatenate([prompt, response.tokens])
        for place, part in enumerate(response.parts):
            path = trace_path(response.parts, place, len(prompt))
            before = [whole[len(prompt) + begin : len(prompt) + end] for begin, end in path]
            own = slice(part.start, part.end)
            segments.append(Segment(np.concatenate([whole[:0], *before]), ROOT))
            segments.append(Segment(response.tokens[own], len(segments) - 1, number, response.mask[own]))
    return segments


def _cut(strands: Sequence[_Strand], num_before: int) -> Iterator[Segment]:
    """Cut strands where others follow from amid them; yield the segments, which follow `num_before` others."""
    for strand in strands:
        if strand.after is not None:
            strand.after.strand.cuts.add(strand.after.offset)
    number = num_before
    for strand in strands:
        parent = ROOT if strand.after is None else strand.after.strand.segments[strand.after.offset]
        begin = 0
        for end in sorted(strand.cuts | {len(strand.tokens)}):
            mask = None if strand.mask is None else strand.mask[begin:end]
            yield Segment(strand.tokens[begin:end], parent, strand.response, mask)
            strand.segments[end] = parent = number
            number, begin = number + 1, end


def _count_given(response: Branching, part: ResponsePart) -> int:
    """Count the tokens at the begin of a part that environments wrote."""
    sampled = response.mask[part.start : part.end]
    return int(sampled.argmax()) if sampled.any() else len(sampled)


def _count_common(begins: Sequence[np.ndarray]) -> int:
    length = min(map(len, begins))
    alike = np.logical_and.reduce([begin[:length] == begins[0][:length] for begin in begins])
    return length if alike.all() else int(alike.argmin())
