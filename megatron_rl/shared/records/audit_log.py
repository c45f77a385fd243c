"""The audit log of a run: a chain of hashes over all that was published, submitted, sampled, claimed and trained on.

Each event is one line of JSON: `seq` counts from 0, `prev` is the hash of the line before, and `hash` is the hash of
this line without `hash`. When a file is full, the chain continues in the next: `audit-000001.jsonl` and so on.
`megatron_rl.shared.records.audit_check` checks the log; docs/audit.md says what it proves.
"""

import hashlib
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from megatron_rl.errors import InputError, MegatronRLError, check_writer
from megatron_rl.shared.protocol.provenance import derive_group_seed
from megatron_rl.shared.protocol.slots import Claim
from megatron_rl.shared.protocol.turns import list_rewards
from megatron_rl.shared.protocol.wire import WIRE_VERSION, Evaluation, Group, Mismatch, Proof, Response, Submission
from megatron_rl.shared.records.append_file import AppendFile, Closing
from megatron_rl.shared.records.audit_events import (
    FILE_NAME,
    AnyEvent,
    Complete,
    Continued,
    EngineReport,
    Evaluate,
    Fail,
    GroupFinished,
    MismatchMeasured,
    NotProven,
    ObjectiveStated,
    Publish,
    Recovered,
    ResponseRecord,
    SlotClaimed,
    SpanRecord,
    Start,
    Submit,
    TrainedWith,
)

MAX_BYTES = 64 << 20


def name_file(first: Path, index: int) -> Path:
    """Return the path of file `index`; file 0 has the log's own name."""
    return first if index == 0 else first.with_name(f"{first.stem}-{index:06d}{first.suffix}")


def find_existing_files(first: Path) -> dict[int, Path]:
    """Find the existing files of a log, by number, in order."""
    pattern = re.compile(rf"{re.escape(first.stem)}-(\d{{6,}}){re.escape(first.suffix)}")
    found = {0: first} if first.exists() else {}
    for path in first.parent.glob(f"{first.stem}-*{first.suffix}"):
        match = pattern.fullmatch(path.name)
        if match and name_file(first, index := int(match[1])) == path:
            found[index] = path
    return dict(sorted(found.items()))


def find_first_file(path: Path) -> Path:
    """Return the first file of a log, which is given by that file or by its folder."""
    return path / FILE_NAME if path.is_dir() else path


def find_files(first: Path) -> dict[int, Path]:
    """Find the existing files of a log; raise InputError if none exists, or if another version wrote them."""
    files = find_existing_files(first)
    if not files:
        raise InputError(f"{first}: No such file or directory; name the log, or the folder that holds {FILE_NAME}")
    if 0 in files:
        _check_first_line(first, next(read_log_lines(first), b""), "read it with that version")
    return files


def read_log_lines(path: Path) -> Iterator[bytes]:
    """Read a file's lines, with their newlines."""
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; name the log, or the folder that holds {FILE_NAME}") from None


FIRST_PREV = "0" * 64
_HASH_PATTERN = re.compile(rb',"hash":"([0-9a-f]{64})"\}$')
_READ_BYTES = 1 << 16


class AuditBroken(MegatronRLError):
    """The end of the log is damaged, so nothing is added to it."""


class AuditLog(Closing):
    """The log, open for appending. AppendFailed, as on a full disk, leaves it as it was."""

    def __init__(
        self,
        path: Path,
        run: str,
        clock: Callable[[], float] = time.time,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Open the log at `path`, its first file; no file grows beyond `max_bytes`, except by its first line."""
        self._clock, self._max_bytes = clock, max_bytes
        self._seq, self._head = 0, FIRST_PREV
        # The first file stays open as long as the log, whichever file is written to: its lock is the log's.
        self._first = self._file = AppendFile(path)
        self._index = 0
        try:
            head = self._first.read(0, min(self._first.size, _READ_BYTES))
            _check_first_line(path, head.partition(b"\n")[0], "resume with that version, or move the log's files away")
            num_bytes_cut = self._continue()
            self._append(Start(run=run))
            if num_bytes_cut:
                self._append(Recovered(num_bytes=num_bytes_cut))
        except BaseException:
            self.close()
            raise

    @property
    def head(self) -> str:
        """Hash of the last line: kept elsewhere, it proves later that no line up to it was changed."""
        return self._head

    @property
    def last(self) -> int:
        """Number of the last line."""
        return self._seq - 1

    def record_publish(
        self,
        version: int,
        fingerprint: str,
        reports: Iterable[EngineReport],
        proof: Proof | None = None,
        base: str = "",
    ) -> None:
        """Record that these engines hold a version, of which only adapters came if it has a base."""
        engines, known = list(reports), base or msgspec.UNSET
        self._append(Publish(version=version, fingerprint=fingerprint, engines=engines, proof=proof, base=known))

    def record_refusal(self, version: int, fingerprint: str, engine: str, reason: str) -> None:
        """Record that an engine does not hold the weights that it reports."""
        self._append(NotProven(version=version, fingerprint=fingerprint, engine=engine, reason=reason[:300]))

    def record_mismatch(self, version: int, mismatch: Mismatch) -> None:
        mean, largest = (value if math.isfinite(value) else None for value in (mismatch.mean, mismatch.largest))
        self._append(
            MismatchMeasured(
                version=version,
                mean=mean,
                largest=largest,
                bound=mismatch.bound,
                num_differing=mismatch.num_differing,
                without_replay=mismatch.without_replay,
            )
        )

    def record_submission(self, submission: Submission) -> None:
        """Record that an iteration begins. After a restart, call `group` and `claim` for all that was restored."""
        self._append(
            Submit(
                version=submission.version,
                fingerprint=submission.fingerprint,
                plan=submission.plan,
                sampling=submission.sampling,
                prompts=[hash_content(prompt.tokens) for prompt in submission.prompts],
                seeds=[
                    derive_group_seed(submission.run, submission.version, prompt.index) for prompt in submission.prompts
                ],
                num_carried=submission.num_carried,
            )
        )

    def record_group(self, version: int, group: Group, is_restored: bool = False) -> None:
        responses = [
            ResponseRecord(
                tokens=hash_content(response.tokens),
                log_probs=hash_content(response.log_probs),
                num_tokens=len(response.tokens) // 4,
                finish_reason=response.finish_reason,
                seed=response.seed,
                engine=response.engine,
                spans=[SpanRecord(span.version, span.start, span.end, span.engine) for span in response.spans],
                branches=[(branch.start, branch.after) for branch in response.branches],
                fingerprint=response.fingerprint,
                reward=response.reward,
                turn_rewards=response.turn_rewards,
                components=response.components,
                experts=_hash_experts(response),
                cause=response.cause,
                refilled=response.refilled,
            )
            for response in group.responses
        ]
        self._append(
            GroupFinished(
                version=version,
                prompt=group.prompt.index,
                prompt_hash=hash_content(group.prompt.tokens),
                row=group.prompt.row,
                is_restored=is_restored,
                responses=responses,
            )
        )

    def record_claim(self, version: int, claim: Claim) -> None:
        """Record a claim, before it is answered."""
        self._append(SlotClaimed(version=version, replica=claim.replica, index=claim.index, prompts=claim.prompts))

    def record_plug_ins(self, version: int, plug_ins: Mapping[str, str]) -> None:
        """Record the user's own functions that the trainer has trained with."""
        self._append(TrainedWith(version=version, sha256=dict(plug_ins)))

    def record_objective(self, version: int, values: Mapping[str, str]) -> None:
        """Record the objective that the trainer trains with from this version on."""
        self._append(ObjectiveStated(version=version, values=dict(values)))

    def record_completion(self, version: int, num_groups: int, num_responses: int) -> None:
        """Record the numbers of groups and responses that the trainer reports to have trained on."""
        self._append(Complete(version=version, num_groups=num_groups, num_responses=num_responses))

    def record_failure(self, version: int, reason: str) -> None:
        """Record an iteration without an update. The reason is cut short, to keep texts of the data out of the log."""
        self._append(Fail(version=version, reason=reason[:200]))

    def record_evaluation(self, evaluation: Evaluation, groups: Sequence[Group]) -> None:
        rewards = [reward for group in groups for reward in list_rewards(group.responses)]
        self._append(
            Evaluate(
                version=evaluation.version,
                fingerprint=evaluation.fingerprint,
                sampling=evaluation.sampling,
                num_prompts=len(groups),
                num_responses=len(rewards),
                mean_reward=sum(rewards) / len(rewards) if rewards else None,
            )
        )

    def close(self) -> None:
        """Close all files; a second call does nothing."""
        self._file.close()
        self._first.close()

    def _append(self, event: AnyEvent) -> None:
        line, line_hash = make_line(self._seq, self._head, self._clock(), event)
        if self._file.size and self._file.size + len(line) > self._max_bytes:
            self._open(self._index + 1)
        if self._index and not self._file.size:
            self._write(*make_line(self._seq, self._head, self._clock(), Continued(file=self._index)))
            line, line_hash = make_line(self._seq, self._head, self._clock(), event)
        self._write(line, line_hash)

    def _write(self, line: bytes, line_hash: str) -> None:
        self._file.append(line)
        self._seq, self._head = self._seq + 1, line_hash

    def _open(self, index: int) -> None:
        """Continue in file `index`; the first file stays open."""
        file = AppendFile(name_file(self._first.path, index)) if index else self._first
        if self._file is not self._first:
            self._file.close()
        self._file, self._index = file, index

    def _continue(self) -> int:
        """Continue after the last whole line of all files; return how many bytes of a torn line were cut off."""
        num_bytes_cut = 0
        # A file without a line is used once the file before it is full.
        for index in reversed(find_existing_files(self._first.path)):
            self._open(index)
            num_bytes_cut += self._find_end()
            if self._file.size:
                break
        return num_bytes_cut

    def _find_end(self) -> int:
        """Continue the chain after the file's last whole line, if any; return how many bytes after it were cut off."""
        content, start = b"", self._file.size
        # Read backwards until a whole line is found, with the newline before it.
        while start > 0 and content.count(b"\n") < 2:
            step = min(start, max(_READ_BYTES, len(content)))
            start -= step
            content = self._file.read(start, step) + content
        whole = content.rfind(b"\n") + 1
        num_bytes_cut = len(content) - whole
        if whole:
            last = content[content.rfind(b"\n", 0, whole - 1) + 1 : whole - 1]
            links = read_links(last)
            if links is None or links.hash != hash_line(last):
                raise AuditBroken(
                    f"{self._file.path}: its last line is damaged. Run `megatron-rl audit {self._file.path}`, move the "
                    "file away, and start again"
                )
            self._seq, self._head = links.seq + 1, links.hash
        if num_bytes_cut:
            self._file.cut(self._file.size - num_bytes_cut)
        return num_bytes_cut


class Links(msgspec.Struct, frozen=True):
    """The fields that link a line to its neighbours."""

    seq: int
    prev: str
    hash: str


def _check_first_line(first: Path, line: bytes, remedy: str) -> None:
    """Raise ForeignVersion if another version wrote a log's first line; a damaged line is the audit's matter."""
    content = line.removesuffix(b"\n")
    links = read_links(content)
    if links is None or links.hash != hash_line(content):
        return
    try:
        start = msgspec.json.decode(content, type=Start)
    except msgspec.DecodeError:
        return
    check_writer(first, start.wire, WIRE_VERSION, remedy)


def make_line(seq: int, prev: str, when: float, event: AnyEvent) -> tuple[bytes, str]:
    """Encode a line, with its newline; return it and its hash."""
    body = b'{"seq":%d,"prev":"%s","time":%.3f,%s' % (seq, prev.encode(), when, msgspec.json.encode(event)[1:])
    line_hash = hashlib.blake2b(body, digest_size=32).hexdigest()
    return b'%s,"hash":"%s"}\n' % (body[:-1], line_hash.encode()), line_hash


def read_links(line: bytes) -> Links | None:
    """Read the links of a line, given without its newline; return None if it has none."""
    try:
        return msgspec.json.decode(line, type=Links)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def hash_line(line: bytes) -> str | None:
    """Hash the content of a line; return None if the line does not end in a hash."""
    match = _HASH_PATTERN.search(line)
    if match is None:
        return None
    return hashlib.blake2b(line[: match.start()] + b"}", digest_size=32).hexdigest()


def _hash_experts(response: Response) -> str:
    if isinstance(response.experts, msgspec.UnsetType):
        return ""
    of_prompt = b"" if isinstance(response.prompt_experts, msgspec.UnsetType) else response.prompt_experts
    return hash_content(of_prompt + response.experts)


def hash_content(content: bytes) -> str:
    """Hash tokens or log-probs, as the log has them."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
