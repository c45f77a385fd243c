"""An audit log that is longer than one file: the chain continues, and no file can be lost or exchanged unseen."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl import cli
from megatron_rl.errors import ExitCode
from megatron_rl.shared.records.append_file import FileInUse
from megatron_rl.shared.records.audit_chain import BreachName
from megatron_rl.shared.records.audit_check import verify
from megatron_rl.shared.records.audit_log import AuditLog, find_existing_files
from tests.submissions import make_plan, make_submission
from tests.unit.test_audit import names, run_iteration


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def write_files(path: Path, versions: tuple[int, ...] = (3, 4, 5), max_bytes: int = 4000) -> tuple[str, list[Path]]:
    """Write a log over several files, opened again for each iteration; return its head and the files."""
    plan = make_plan(num_prompts=2, group_size=2, micro_batch_size=2)
    for version in versions:
        with AuditLog(path, "run", max_bytes=max_bytes) as log:
            run_iteration(log, make_submission(plan, version=version), [1, 0])
            head = log.head
    return head, list(find_existing_files(path).values())


def test_a_full_log_continues_in_another_file_and_the_chain_with_it(path: Path, capsys) -> None:
    head, files = write_files(path)
    assert [file.name for file in files[:3]] == ["audit.jsonl", "audit-000001.jsonl", "audit-000002.jsonl"]
    assert all(file.stat().st_size <= 4000 and file.stat().st_mode & 0o777 == 0o600 for file in files)
    report = verify(path, [head])
    assert report.breaches == []
    assert [summary.version for summary in report.iterations] == [3, 4, 5]
    assert report.num_covered == report.num_lines == sum(len(file.read_bytes().splitlines()) for file in files)
    assert cli.main(["audit", str(path.parent), "--head", head]) == ExitCode.OK
    assert "0 breaches" in capsys.readouterr().out


def test_a_line_longer_than_a_file_may_be_has_a_file_of_its_own(path: Path) -> None:
    _, files = write_files(path, max_bytes=1)
    assert verify(path).breaches == []
    assert len(files) == verify(path).num_lines - (len(files) - 1)


def exchange(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


FILE_TAMPERINGS: dict[str, tuple[Callable[[list[Path]], object], BreachName, str]] = {
    "missing": (
        lambda files: files[1].unlink(),
        BreachName.MISSING_FILE,
        "audit-000001.jsonl is missing before audit-000002",
    ),
    "first missing": (
        lambda files: files[0].unlink(),
        BreachName.MISSING_FILE,
        "audit.jsonl is missing before audit-000001",
    ),
    "exchanged": (lambda files: exchange(files[1], files[2]), BreachName.EXCHANGED_FILE, "audit-000001.jsonl does"),
    "first exchanged": (lambda files: exchange(*files[:2]), BreachName.EXCHANGED_FILE, "audit.jsonl does not"),
    "copied": (
        lambda files: files[2].write_bytes(files[1].read_bytes()),
        BreachName.EXCHANGED_FILE,
        "audit-000002.jsonl does not",
    ),
    "renamed": (lambda files: files[-1].rename(files[-1].with_name("audit-000900.jsonl")), BreachName.MISSING_FILE, ""),
}


@pytest.mark.parametrize(("tamper", "name", "detail"), FILE_TAMPERINGS.values(), ids=FILE_TAMPERINGS)
def test_a_missing_or_exchanged_file_is_caught_by_its_name(path: Path, tamper, name: BreachName, detail: str) -> None:
    _, files = write_files(path)
    assert len(files) >= 4
    tamper(files)
    assert any(breach.name is name and detail in breach.detail for breach in verify(path).breaches)


def test_a_file_of_another_run_is_reported_as_exchanged(path: Path, tmp_path: Path) -> None:
    _, files = write_files(path)
    _, others = write_files(tmp_path / "other" / "audit.jsonl", versions=(3, 4, 5, 6))
    assert others[1].read_bytes() != files[1].read_bytes()
    files[1].write_bytes(others[1].read_bytes())
    assert BreachName.EXCHANGED_FILE in names(verify(path))


def test_a_breach_in_a_later_file_is_printed_with_its_file(path: Path, capsys) -> None:
    _, files = write_files(path)
    lines = files[1].read_bytes().splitlines(keepends=True)
    files[1].write_bytes(b"".join([lines[0], lines[1].replace(b'"time":', b'"time": '), *lines[2:]]))
    assert cli.main(["audit", str(path)]) == ExitCode.RUN
    assert "BREACH line 2 of audit-000001.jsonl: changed content" in capsys.readouterr().out


@pytest.mark.parametrize("keep", [0, 1, 40, -1])
def test_a_file_that_a_kill_left_begun_is_taken_up_again(path: Path, keep: int) -> None:
    _, files = write_files(path)
    first_line = files[-1].read_bytes().splitlines(keepends=True)[0]
    files[-1].write_bytes(first_line[:keep] if keep >= 0 else first_line)
    with AuditLog(path, "run", max_bytes=4000) as log:
        head = log.head
    report = verify(path, [head])
    assert report.breaches == []
    assert report.num_recovered == (keep > 0)
    assert list(find_existing_files(path).values()) == files


def test_a_log_that_is_open_is_locked_whichever_file_is_written_to(path: Path) -> None:
    with AuditLog(path, "run", max_bytes=1) as log:
        log.record_failure(1, "reason")
        with pytest.raises(FileInUse):
            AuditLog(path, "run")
        assert len(find_existing_files(path)) > 1
    AuditLog(path, "run").close()
