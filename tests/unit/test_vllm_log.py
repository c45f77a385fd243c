"""The cause of a vLLM's end is found in the output of real ones (`tests/sidecar/vllm_logs`)."""

from pathlib import Path

import pytest

from megatron_rl.sidecar.vllm.server_log import find_cause

LOGS = Path(__file__).parents[1] / "sidecar" / "vllm_logs"
WORKER = "(Worker_TP{} pid=7{}) ERROR 11-22 07:43:{} [multiproc_executor.py:1063] {}"


def lines_of(name: str) -> list[str]:
    return (LOGS / f"{name}.log").read_text().splitlines()


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        (
            "unsupported_head",
            "in its worker:",
            "RuntimeError: Unsupported CPU attention configuration: head_dim=16 isa=2 kv_cache_idx=0",
        ),
        ("no_memory", "in its worker:", "less than requested memory for kv (4000.0 GiB)"),
        ("heads_not_divided", "in its server:", "attention heads (8) must be divisible by tensor parallel size (3)"),
        ("no_vllm", "in its server:", "ModuleNotFoundError: No module named 'vllm'"),
    ],
)
def test_the_cause_is_the_innermost_process_error_with_its_last_frames(name: str, first: str, last: str) -> None:
    found = find_cause(lines_of(name))
    assert found.splitlines()[0] == first
    assert last in found
    assert found.count('  File "') + found.count("  File <") == 2
    assert "see stack trace" not in found.lower()
    assert "^^^^" not in found
    assert len(found.splitlines()) <= 10


def test_the_worker_that_failed_first_counts_though_their_lines_are_mixed() -> None:
    tracebacks = {
        0: ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "    f()", "KeyError: 'the cause'"],
        1: ["Traceback (most recent call last):", '  File "b.py", line 2, in g', "    g()", "ConnectionError: peer"],
    }
    mixed = [WORKER.format(rank, rank, "06", tracebacks[rank][line]) for line in range(4) for rank in (0, 1)]
    assert find_cause(mixed).splitlines() == [
        "in its worker:",
        '  File "a.py", line 1, in f',
        "    f()",
        "KeyError: 'the cause'",
    ]


def test_a_survived_error_and_a_warning_are_not_the_cause() -> None:
    early = [
        WORKER.format(0, 0, "06", text) for text in ("Traceback (most recent call last):", "KeyError: 'a request'")
    ]
    warning = "(APIServer pid=1) WARNING 11-22 07:49:06 [base.py:380] "
    warned = [f"{warning}Traceback (most recent call last):", f"{warning}ValueError: no template"]
    log = [*early, *warned, "(APIServer pid=1) INFO 11-22 07:49:06 [loggers.py:1] Engine 000: 4 tokens/s", "Killed"]
    found = find_cause(log)
    assert found.splitlines()[-1] == "Killed"
    assert "in its" not in found


def test_a_killed_worker_is_named_before_the_cores_own_error() -> None:
    core = "(EngineCore pid=5) ERROR 11-22 07:43:06 [multiproc_executor.py:300] "
    log = [
        f"{core}Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor.",
        f"{core}Traceback (most recent call last):",
        f'{core}  File "core.py", line 9, in step',
        f"{core}vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
    ]
    assert find_cause(log).splitlines()[:2] == [
        "in its core:",
        "Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor.",
    ]


def test_without_a_traceback_the_last_lines_are_given() -> None:
    usage = [f"  [--flag-{number}]" for number in range(300)]
    found = find_cause([*usage, "vllm_main.py: error: unrecognized arguments: --no-such-flag"])
    assert found.splitlines()[-1] == "vllm_main.py: error: unrecognized arguments: --no-such-flag"
    assert len(found.splitlines()) == 10
    assert find_cause([]) == ""
