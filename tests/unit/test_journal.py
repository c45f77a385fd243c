"""The journal: every record comes back, a torn tail is cut off, damage is named, room is bounded."""

import contextlib
import errno
import os
import random
import resource
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import ForeignVersion, InputError
from megatron_rl.shared.protocol.slots import Claim
from megatron_rl.shared.protocol.wire import WIRE_VERSION, Sampling, encode_tokens
from megatron_rl.shared.records import journal as journals
from megatron_rl.shared.records.append_file import AppendFailed, AppendFile, FileInUse
from megatron_rl.shared.records.journal import Journal, JournalDamaged, JournalFolder
from tests.killing import kill_while_appending
from tests.submissions import make_group, make_plan, make_submission, with_response

SUBMISSION = make_submission()
CLAIM = Claim(replica=1, index=2, prompts=[4])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal" / "00000003.journal"


def write(path: Path, groups: list[int], claims: list[Claim] | None = None) -> list[int]:
    """Journal these groups, then these claims; return the size of the file after each."""
    sizes = []
    with Journal(path, SUBMISSION) as journal:
        sizes.append(path.stat().st_size)
        for prompt in groups:
            journal.append_group(make_group(SUBMISSION, prompt))
            sizes.append(path.stat().st_size)
        for claim in claims or []:
            journal.append_claim(claim)
            sizes.append(path.stat().st_size)
    return sizes


def prompts_in(journal: Journal) -> list[int]:
    return [group.prompt.index for group in journal.recovered.groups]


def test_records_come_back_in_the_order_in_which_they_were_written(path: Path) -> None:
    claims = [CLAIM, Claim(replica=0, index=0, prompts=[2])]
    write(path, [4, 2, 7], claims)
    with Journal(path, SUBMISSION) as journal:
        assert journal.recovered.groups == [make_group(SUBMISSION, prompt) for prompt in (4, 2, 7)]
        assert journal.recovered.claims == claims
        assert (journal.recovered.num_bytes_cut, journal.recovered.num_stale) == (0, 0)
        journal.forget_recovered()
        assert (journal.recovered.groups, journal.recovered.claims) == ([], [])
        journal.append_group(make_group(SUBMISSION, 0))
    with Journal(path, SUBMISSION) as journal:
        assert prompts_in(journal) == [4, 2, 7, 0]
        assert journal.recovered.claims == claims


@settings(max_examples=40)
@given(st.integers(0, 400))
def test_a_tail_that_is_torn_anywhere_is_cut_off_and_all_before_it_comes_back(tmp_path_factory, torn: int) -> None:
    path = tmp_path_factory.mktemp("run") / "journal"
    sizes = write(path, [4, 2])
    torn = max(sizes[1], sizes[2] - 1 - torn)
    os.truncate(path, torn)
    with Journal(path, SUBMISSION) as journal:
        assert prompts_in(journal) == [4]
        assert journal.recovered.num_bytes_cut == torn - sizes[1]
        journal.append_group(make_group(SUBMISSION, 5))
    with Journal(path, SUBMISSION) as journal:
        assert prompts_in(journal) == [4, 5]
        assert journal.recovered.num_bytes_cut == 0


@settings(max_examples=60)
@given(st.data())
def test_a_changed_byte_anywhere_is_named_with_its_record_and_a_remedy(tmp_path_factory, data) -> None:
    path = tmp_path_factory.mktemp("run") / "journal"
    sizes = write(path, [4, 2], [CLAIM])
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    record = max([size for size in [0, *sizes] if size <= place])
    with pytest.raises(JournalDamaged, match=f"the record at byte {record} is damaged .* resume from the checkpoint"):
        Journal(path, SUBMISSION)
    assert path.read_bytes() == content


def test_a_record_with_a_wrong_head_is_damaged_and_not_a_torn_tail(path: Path) -> None:
    write(path, [4])
    with path.open("ab") as file:
        file.write(b"\0\0\0")
    with pytest.raises(JournalDamaged, match="its head is wrong"):
        Journal(path, SUBMISSION)


@pytest.mark.parametrize("writer", [1, WIRE_VERSION - 1, WIRE_VERSION + 1])
def test_a_journal_of_another_version_is_refused_with_both_versions_and_a_remedy(
    path: Path, monkeypatch: pytest.MonkeyPatch, writer: int
) -> None:
    with monkeypatch.context() as other:
        other.setattr(journals, "WIRE_VERSION", writer)
        write(path, [4])
    text = (
        rf"journal was written by another version of megatron_rl \(its format is {writer}, and this version reads "
        rf"{WIRE_VERSION}\): move the file away and resume from the checkpoint"
    )
    with pytest.raises(ForeignVersion, match=text):
        Journal(path, SUBMISSION)


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "another"},
        {"fingerprint": "e" * 64},
        {"version": 4},
        {"sampling": Sampling(max_tokens=5, temperature=0.7)},
        {"plan": make_plan(group_size=2, num_prompts=16)},
        {"prompts": [msgspec.structs.replace(prompt, tokens=encode_tokens([9])) for prompt in SUBMISSION.prompts]},
        {"prompts": [msgspec.structs.replace(prompt, columns={"answer": 1}) for prompt in SUBMISSION.prompts]},
    ],
    ids=["run", "fingerprint", "version", "sampling", "group size", "prompt", "columns"],
)
def test_groups_come_back_only_for_the_submission_they_were_sampled_for(path: Path, changes) -> None:
    write(path, [4, 2], [CLAIM])
    changed = make_submission(**changes) if "plan" in changes else msgspec.structs.replace(SUBMISSION, **changes)
    with Journal(path, changed) as journal:
        assert journal.recovered.groups == []
        assert journal.recovered.claims == []
        assert journal.recovered.num_stale == 2
    with Journal(path, SUBMISSION) as journal:
        assert prompts_in(journal) == [4, 2]


def test_groups_that_other_rewards_scored_and_their_claims_do_not_come_back(path: Path) -> None:
    write(path, [4, 2], [CLAIM])
    claim = Claim(replica=0, index=0, prompts=[5])
    with Journal(path, SUBMISSION, scoring="length=1") as journal:
        assert journal.recovered.num_stale == 2
        assert (journal.recovered.groups, journal.recovered.claims) == ([], [])
        journal.append_group(make_group(SUBMISSION, 5))
        journal.append_claim(claim)
    with Journal(path, SUBMISSION, scoring="length=1") as journal:
        assert prompts_in(journal) == [5]
        assert journal.recovered.claims == [claim]
    with Journal(path, SUBMISSION) as journal:
        assert prompts_in(journal) == [4, 2]
        assert journal.recovered.claims == []


@pytest.mark.parametrize("plan", [make_plan(num_replicas=4), make_plan(micro_batch_size=2), make_plan(order="prompt")])
def test_another_plan_takes_over_the_groups_and_not_the_claims(path: Path, plan) -> None:
    write(path, [4, 2], [CLAIM])
    with Journal(path, make_submission(plan)) as journal:
        assert prompts_in(journal) == [4, 2]
        assert journal.recovered.claims == []
        journal.append_claim(Claim(replica=0, index=0, prompts=[2]))
    with Journal(path, make_submission(plan, deadline_seconds=1.0)) as journal:
        assert journal.recovered.claims == [Claim(replica=0, index=0, prompts=[2])]
    with Journal(path, SUBMISSION) as journal:
        assert journal.recovered.claims == []


def test_a_group_that_was_written_twice_comes_back_once_as_it_was_first(path: Path) -> None:
    with Journal(path, SUBMISSION) as journal:
        journal.append_group(make_group(SUBMISSION, 4, engine="first"))
        journal.append_group(make_group(SUBMISSION, 4, engine="second"))
    with Journal(path, SUBMISSION) as journal:
        assert journal.recovered.groups == [make_group(SUBMISSION, 4, engine="first")]


def test_records_larger_than_what_is_read_at_once_come_back(path: Path) -> None:
    submission = make_submission(sampling=Sampling(max_tokens=100_000))
    groups = [make_group(submission, prompt, num_tokens=100_000 - 7 * prompt) for prompt in range(3)]
    with Journal(path, submission) as journal:
        for group in groups:
            journal.append_group(group)
    with Journal(path, submission) as journal:
        assert journal.recovered.groups == groups


def test_kill_9_in_the_middle_of_appending_loses_nothing_that_append_returned_from(path: Path) -> None:
    random_number = random.Random(5)
    submission = make_submission(make_plan(num_prompts=4096))
    group = with_response(make_group(submission, 0), 0, tokens=bytes(2_000_000))
    for moment in range(6):
        file = path.with_name(f"{moment:08d}")
        told = kill_while_appending(
            f"""
            import msgspec
            from pathlib import Path
            from megatron_rl.shared.records.journal import Journal
            from tests.submissions import make_group, make_plan, make_submission, with_response
            submission = make_submission(make_plan(num_prompts=4096))
            group = with_response(make_group(submission, 0), 0, tokens=bytes(2_000_000))
            journal = Journal(Path({str(file)!r}), submission)
            for prompt in submission.prompts:
                journal.append_group(msgspec.structs.replace(group, prompt=prompt))
                print(prompt.index)
            """,
            random_number,
        )
        with Journal(file, submission) as journal:
            prompts = prompts_in(journal)
            # One record may be whole without being reported: the kill came between the two.
            assert prompts in (list(range(told)), list(range(told + 1)))
            assert all(found.responses == group.responses for found in journal.recovered.groups)
            journal.append_group(make_group(submission, 4095))
        with Journal(file, submission) as journal:
            assert prompts_in(journal) == [*prompts, 4095]
            assert journal.recovered.num_bytes_cut == 0
        file.unlink()


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Cut a write beyond `num_bytes` short and fail the next one, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_append_that_finds_no_room_is_named_and_leaves_the_journal_as_it_was(path: Path) -> None:
    with Journal(path, SUBMISSION) as journal:
        journal.append_group(make_group(SUBMISSION, 4))
        before = path.read_bytes()
        for room in (0, 1, 20, 300):
            with (
                files_of_at_most(len(before) + room),
                pytest.raises(AppendFailed, match=r"File too large \(\d+ bytes are free\); raise the limit"),
            ):
                journal.append_group(make_group(SUBMISSION, 5))
            assert path.read_bytes() == before
        journal.append_group(make_group(SUBMISSION, 6))
    with Journal(path, SUBMISSION) as journal:
        assert prompts_in(journal) == [4, 6]
        assert journal.recovered.num_bytes_cut == 0


def test_bytes_of_a_failed_append_that_could_not_be_cut_are_cut_later(path: Path, monkeypatch) -> None:
    def fail(descriptor: int, *what: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write_half(descriptor: int, pieces: list[bytes]) -> int:
        return os.write(descriptor, b"".join(pieces)[:9])

    for reopen in (False, True):
        with Journal(path, SUBMISSION) as journal:
            with monkeypatch.context() as patch:
                patch.setattr(os, "writev", lambda *what: write_half(*what) and fail(0))
                patch.setattr(os, "ftruncate", fail)
                for _ in range(2):
                    with pytest.raises(AppendFailed, match="No space left on device"):
                        journal.append_group(make_group(SUBMISSION, 5))
            if not reopen:
                journal.append_group(make_group(SUBMISSION, 6))
    with Journal(path, SUBMISSION) as journal:
        assert prompts_in(journal) == [6]
        assert journal.recovered.num_bytes_cut == 9


def test_a_second_writer_is_refused_until_the_first_has_closed(path: Path) -> None:
    folder = path.parent
    with JournalFolder(folder) as journals:
        with pytest.raises(FileInUse, match=r"lock is written by another process: end that sidecar"):
            JournalFolder(folder)
        with journals.open(SUBMISSION), pytest.raises(FileInUse):
            Journal(path, SUBMISSION)
        with Journal(path, SUBMISSION):
            pass
    JournalFolder(folder).close()


def test_only_the_owner_can_read_and_a_folder_open_to_others_is_refused(path: Path, tmp_path: Path) -> None:
    with JournalFolder(path.parent) as journals, journals.open(SUBMISSION):
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert path.stat().st_mode & 0o777 == 0o600
    path.parent.chmod(0o750)
    with pytest.raises(InputError, match=r"is open to others \(mode 750\): chmod go="):
        JournalFolder(path.parent)
    path.chmod(0o644)
    with pytest.raises(InputError, match=r"mode 644"):
        Journal(path, SUBMISSION)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(AppendFailed, match="cannot be opened"):
        AppendFile(tmp_path / "link")


@pytest.mark.parametrize("retain", [1, 3])
def test_the_requested_number_of_journals_is_kept_and_always_the_current_one(path: Path, retain: int) -> None:
    def kept() -> list[int]:
        return sorted(int(file.stem) for file in path.parent.glob("*.journal"))

    with JournalFolder(path.parent, retain=retain) as journals:
        for version in range(6):
            with journals.open(make_submission(version=version)):
                assert kept() == list(range(max(0, version - retain + 1), version + 1))
        with journals.open(make_submission(version=1)):
            assert kept() == sorted([1, *range(6 - retain + 1, 6)])
    with pytest.raises(InputError, match="at least 1"):
        JournalFolder(path.parent, retain=0)
