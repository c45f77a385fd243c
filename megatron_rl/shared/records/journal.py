"""The journal: finished groups and claims, from which a sidecar or a trainer resumes after a kill.

Each iteration has one file, `<version>.journal`, in a folder of the run. Invariants:

- an appended record survives a kill -9 of this process, and not a loss of power;
- a record that a kill has torn is cut off at reopening, and reported; any other damage raises JournalDamaged, and the
  audit counts it as a breach;
- a group is recovered only under the key for which it was sampled and scored: run, fingerprint, version, prompt (index,
  tokens, columns), seed, sampling parameters, group size, and the caller's description of the rewards;
- claims are recovered only for their own submission and rewards: another plan divides the same groups differently, and
  groups with other rewards are sampled again;
- an append that fails leaves the journal as it was;
- one process has the folder open; at most `retain` files are kept: the current one and those of the highest versions.
"""

import contextlib
import dataclasses
import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from megatron_rl.errors import ForeignVersion, InputError, MegatronRLError, check_writer
from megatron_rl.shared.protocol.provenance import derive_group_seed
from megatron_rl.shared.protocol.slots import Claim
from megatron_rl.shared.protocol.wire import WIRE_VERSION, Group, Response, Submission
from megatron_rl.shared.records.append_file import AppendFile, Closing, make_private_folder

JOURNALS = "journal"
"""The folder of the journals, in the folder of a run."""
_MAGIC = b"mrlj"
# Precedes each payload: the magic, the payload's length and checksum, and the checksum of these three.
_HEAD = struct.Struct("<4sIII")
_READ_BYTES = 1 << 20
_REMEDY = "move the file away and resume from the checkpoint, and its groups are sampled again"


class JournalDamaged(MegatronRLError):
    """A record in the journal was changed."""


class _SubmissionBegun(msgspec.Struct, frozen=True, kw_only=True, tag="begun"):
    """The submission and rewards to which the following records belong."""

    wire: int
    submission: bytes


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """A group, under the key for which it was sampled and scored."""

    key: bytes
    prompt_index: int
    prompt_tokens: bytes
    responses: list[Response]


class _Claimed(msgspec.Struct, frozen=True, kw_only=True, tag="claimed"):
    claim: Claim


_Record = _SubmissionBegun | Finished | _Claimed


@dataclasses.dataclass(frozen=True)
class RecoveredJournal:
    """The groups and claims that a journal held, in the order of writing."""

    groups: list[Group]
    claims: list[Claim]
    num_bytes_cut: int
    """Number of bytes of a record that a kill had torn."""
    num_stale: int
    """Number of groups that were sampled for another submission."""


class JournalFolder(Closing):
    def __init__(self, folder: Path, retain: int = 2, scoring: str = "") -> None:
        """Open the folder; `scoring` describes the rewards: groups that were scored otherwise are not recovered."""
        if retain < 1:
            raise InputError(
                f"the number of journals to keep must be at least 1, for the current iteration, not {retain}"
            )
        self._folder = folder
        self._retain = retain
        self._scoring = scoring
        make_private_folder(folder)
        self._lock = AppendFile(folder / "lock")

    def open(self, submission: Submission) -> "Journal":
        """Open the journal of an iteration, with the records of an earlier process; delete old journals."""
        path = find_journal(self._folder, submission.version)
        journal = Journal(path, submission, self._scoring)
        others = sorted(path for path in self._folder.glob("*.journal") if path != journal.path)
        for path in others[: max(0, len(others) + 1 - self._retain)]:
            path.unlink()
        return journal

    def close(self) -> None:
        """Release the folder for another process."""
        self._lock.close()


class Journal(Closing):
    """The journal of one iteration, open for appending; `recovered` has the records that it held before."""

    def __init__(self, path: Path, submission: Submission, scoring: str = "") -> None:
        self.path = path
        self._scoring = scoring
        self._submission = submission
        self._file = AppendFile(path)
        try:
            self.recovered = self._recover()
        except BaseException:
            self._file.close()
            raise

    def append_group(self, group: Group) -> None:
        """Append a finished group. AppendFailed leaves the journal as it was, here and below."""
        prompt = group.prompt
        key = make_group_key(self._submission, prompt.index, self._scoring)
        self._append(
            Finished(key=key, prompt_index=prompt.index, prompt_tokens=prompt.tokens, responses=group.responses)
        )

    def append_claim(self, claim: Claim) -> None:
        """Append a claim, before it is answered."""
        self._append(_Claimed(claim=claim))

    def forget_recovered(self) -> None:
        """Free the memory of the recovered records, once the caller has taken them over."""
        self.recovered = RecoveredJournal([], [], self.recovered.num_bytes_cut, self.recovered.num_stale)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def _append(self, record: _Record) -> None:
        payload = msgspec.msgpack.encode(record)
        self._file.append(_head(payload), payload)

    def _recover(self) -> RecoveredJournal:
        mine = _claims_key(self._submission, self._scoring)
        prompts = self._submission.prompts
        keys = {make_group_key(self._submission, prompt.index, self._scoring): prompt for prompt in prompts}
        groups: dict[int, Group] = {}
        claims: list[Claim] = []
        is_mine, num_stale, end = False, 0, 0
        for offset, payload in _payloads(self.path, self._file.size, self._file.read):
            record = _decode(payload, self.path, offset)
            if isinstance(record, _SubmissionBegun):
                is_mine, claims = record.submission == mine, []
            elif isinstance(record, _Claimed):
                claims += [record.claim] if is_mine else []
            elif record.key in keys:
                # The first group stays, because it may have been claimed.
                groups.setdefault(record.prompt_index, Group(prompt=keys[record.key], responses=record.responses))
            else:
                num_stale += 1
            end = offset + _HEAD.size + len(payload)
        num_bytes_cut = self._file.size - end
        if num_bytes_cut:
            self._file.cut(end)
        if not is_mine:
            self._append(_SubmissionBegun(wire=WIRE_VERSION, submission=mine))
        return RecoveredJournal(list(groups.values()), claims, num_bytes_cut, num_stale)


def find_journal(folder: Path, version: int) -> Path:
    """Return the path of an iteration's journal, in the folder of a run's journals."""
    return folder / f"{version:08d}.journal"


def read_groups(path: Path) -> Iterator[Finished]:
    """Read every group in a journal, under any key; a sidecar may have the journal open."""
    with path.open("rb") as file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size
        for offset, payload in _payloads(path, size, lambda offset, size: os.pread(descriptor, size, offset)):
            record = _decode(payload, path, offset)
            if isinstance(record, Finished):
                yield record


def find_damage(folder: Path) -> Iterator[tuple[int, JournalDamaged]]:
    """Find the journals with a changed record, in the folder of a run's journals; yield version and error of each."""
    for path in sorted(folder.glob(f"{'[0-9]' * 8}.journal")):
        try:
            # A run that continues deletes old ones meanwhile.
            with contextlib.suppress(FileNotFoundError, ForeignVersion):
                for _ in read_groups(path):
                    pass
        except JournalDamaged as error:
            yield int(path.stem), error


def make_group_key(submission: Submission, prompt_index: int, scoring: str = "") -> bytes:
    """Make the key of a group from all that it was sampled and scored for."""
    what = (
        submission.run,
        submission.fingerprint,
        submission.version,
        submission.prompts[prompt_index],
        derive_group_seed(submission.run, submission.version, prompt_index),
        submission.sampling,
        submission.plan.group_size,
        scoring,
    )
    return _hash(what)


def _claims_key(submission: Submission, scoring: str) -> bytes:
    """Make the key of claims from everything that decides whether they fit: all but the deadline."""
    return _hash((msgspec.structs.replace(submission, deadline_seconds=1.0), scoring))


def _hash(what: object) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(what), digest_size=16).digest()


def _head(payload: bytes) -> bytes:
    start = struct.pack("<4sII", _MAGIC, len(payload), zlib.crc32(payload))
    return start + struct.pack("<I", zlib.crc32(start))


def _payloads(path: Path, file_size: int, read: Callable[[int, int], bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield each whole record's offset and payload; stop before a torn record.

    A kill cuts a record short, so a head or payload of full length with a wrong checksum is damage. The head has its
    own checksum: otherwise a changed length would make all later records look torn.
    """
    offset, buffer, start = 0, b"", 0

    def take(position: int, size: int) -> bytes:
        nonlocal buffer, start
        if position + size > start + len(buffer):
            buffer, start = read(position, max(size, _READ_BYTES)), position
        return buffer[position - start : position - start + size]

    while offset < file_size:
        head = take(offset, _HEAD.size)
        if len(head) < _HEAD.size:
            if not (head.startswith(_MAGIC) or _MAGIC.startswith(head)):
                raise _damaged(path, offset, "its head is wrong")
            return
        magic, length, checksum, head_checksum = _HEAD.unpack(head)
        if magic != _MAGIC or head_checksum != zlib.crc32(head[:-4]):
            raise _damaged(path, offset, "its head is wrong")
        payload = take(offset + _HEAD.size, length)
        if len(payload) < length:
            return
        if zlib.crc32(payload) != checksum:
            raise _damaged(path, offset, "its checksum is wrong")
        yield offset, payload
        offset += _HEAD.size + length


def _decode(payload: bytes, path: Path, offset: int) -> _Record:
    try:
        record: _Record = msgspec.msgpack.decode(payload, type=_Record)
    except msgspec.DecodeError as error:
        raise _damaged(path, offset, f"{error}") from None
    if isinstance(record, _SubmissionBegun):
        check_writer(path, record.wire, WIRE_VERSION, f"{_REMEDY}; or resume with that version")
    return record


def _damaged(path: Path, offset: int, what: str) -> JournalDamaged:
    return JournalDamaged(f"{path}: the record at byte {offset} is damaged ({what}): {_REMEDY}")
