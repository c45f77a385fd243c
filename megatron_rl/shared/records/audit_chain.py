"""Checks that an audit log has all lines that were written: unchanged, once each, in order."""

import dataclasses
import enum
from collections.abc import Iterable

import msgspec

from megatron_rl.shared.records.audit_events import AnyEvent
from megatron_rl.shared.records.audit_log import FIRST_PREV, hash_line, read_links


class BreachName(enum.StrEnum):
    """The name of each fault that a log can have."""

    TRUNCATED_LINE = "truncated line"
    LEFT_OUT = "response left out without a cause"
    UNREADABLE_LINE = "unreadable line"
    CHANGED_CONTENT = "changed content"
    BROKEN_CHAIN = "broken chain"
    MISSING_LINE = "missing line"
    MISSING_FILE = "missing file"
    EXCHANGED_FILE = "exchanged file"
    DOUBLED_LINE = "doubled line"
    REORDERED_LINE = "reordered line"
    HEAD_NOT_FOUND = "head not found"
    FOREIGN_RUN = "foreign run"
    SKIPPED_VERSION = "skipped version"
    NOT_PUBLISHED = "version not published"
    ENGINE_DIFFERS = "engine holds other weights"
    OTHER_BASE = "adapters on another base"
    NOT_PROVEN = "engine proved not to hold its version"
    NOT_COMPARED = "parameters of an engine not compared"
    PROBE_DIFFERS = "engine's log-probs are not the trainer's"
    MISMATCH = "tokens not sampled by the trainer's policy"
    UNKNOWN_ENGINE = "unknown engine"
    FOREIGN_FINGERPRINT = "foreign fingerprint"
    WRONG_SPAN = "wrong version span"
    TWO_VERSIONS = "two versions in a response"
    NEVER_SUBMITTED = "group never submitted"
    WRONG_PROMPT = "another prompt"
    FINISHED_TWICE = "group finished twice"
    INCOMPLETE_GROUP = "incomplete group"
    NO_FINISH_REASON = "response without finish reason"
    CUT_OFF = "response cut off"
    WRONG_SEED = "wrong seed"
    CLAIM_OUTSIDE = "claim outside of an iteration"
    WRONG_SLOT = "wrong slot"
    SLOT_CLAIMED_TWICE = "slot claimed twice"
    CLAIM_UNFINISHED = "claim of an unfinished group"
    CLAIMED_TWICE = "group claimed twice"
    NEVER_FINISHED = "group never finished"
    NEVER_CLAIMED = "group never claimed"
    NOT_CARRIED = "put-off prompt is missing"
    WRONG_COUNT = "wrong count"
    COMPLETE_OUTSIDE = "completion outside of an iteration"
    DAMAGED_JOURNAL = "damaged journal"
    OTHER_JOURNAL = "journal holds other responses"
    OTHER_CHECKPOINT = "checkpoint holds other weights"
    OTHER_LOG_PROBS = "log-probs of other weights"


@dataclasses.dataclass(frozen=True)
class Breach:
    """A fault of the log, with the line that shows it, counted from 1 over all files."""

    name: BreachName
    line: int
    detail: str


class Chain:
    """The check of the lines' hashes and numbers; it takes the lines in the order of the files."""

    def __init__(self, heads: Iterable[str] = ()) -> None:
        """Begin before the first line; each of `heads` must be the hash of a line."""
        self.breaches: list[Breach] = []
        self.heads_found: dict[str, int] = {}
        self._heads = frozenset(heads)
        self.head = FIRST_PREV
        self._next_seq = 0
        self._decoder = msgspec.json.Decoder(AnyEvent)
        # Ranges of skipped numbers, each with the line after it.
        self._gaps: list[tuple[range, int]] = []
        # Lines without a readable number since the last line with a number.
        self._num_unknown = 0

    def take(self, number: int, line: bytes) -> AnyEvent | None:
        """Return the event of a line, given with its newline; None if the line has no event or is a repetition."""
        content = line.removesuffix(b"\n")
        own_hash = hash_line(content)
        links = read_links(content)
        if content == line or own_hash is None:
            self._breach(BreachName.TRUNCATED_LINE, number, f"{len(content)} bytes without an end")
            self._num_unknown += 1
            return None
        if links is None:
            self._breach(BreachName.UNREADABLE_LINE, number, "it does not state its number")
            self._num_unknown += 1
            return None
        if links.hash != own_hash:
            self._breach(BreachName.CHANGED_CONTENT, number, f"its hash is {own_hash}, and it says {links.hash}")
        if not self._place(number, links.seq, links.prev, links.hash):
            return None
        if own_hash in self._heads:
            self.heads_found[own_hash] = number
        try:
            return self._decoder.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._breach(BreachName.UNREADABLE_LINE, number, str(error))
            return None

    def finish(self) -> None:
        """Report the missing lines and heads, after the last line."""
        for gap, number in self._gaps:
            which = f"{gap.start}" if len(gap) == 1 else f"{gap.start} to {gap.stop - 1}"
            self._breach(BreachName.MISSING_LINE, number, f"number {which} of the log is missing")
        for head in self._heads - self.heads_found.keys():
            self._breach(BreachName.HEAD_NOT_FOUND, 0, f"no line has the hash {head}: the log was changed or cut short")

    def _place(self, number: int, seq: int, prev: str, line_hash: str) -> bool:
        """Find the place of a line among the others; return False if its number came before."""
        if seq < self._next_seq:
            gap = next((gap for gap in self._gaps if seq in gap[0]), None)
            if gap is None:
                self._breach(BreachName.DOUBLED_LINE, number, f"number {seq} of the log came before")
                return False
            self._breach(BreachName.REORDERED_LINE, number, f"number {seq} of the log comes after {self._next_seq - 1}")
            self._gaps.remove(gap)
            parts = (range(gap[0].start, seq), range(seq + 1, gap[0].stop))
            self._gaps += [(part, gap[1]) for part in parts if part]
            return True
        skipped = range(self._next_seq + self._num_unknown, seq)
        if skipped:
            self._gaps.append((skipped, number))
        elif not self._num_unknown and prev != self.head:
            self._breach(
                BreachName.BROKEN_CHAIN, number, f"the line before has the hash {self.head}, and it says {prev}"
            )
        self._next_seq, self.head, self._num_unknown = seq + 1, line_hash, 0
        return True

    def _breach(self, name: BreachName, number: int, detail: str) -> None:
        self.breaches.append(Breach(name, number, detail))
