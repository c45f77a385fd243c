"""The data of a report, in the form that the page's script reads."""

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.analysis.report.curves import collect_curves, collect_times, derive_throughput
from megatron_rl.analysis.report.rollouts import MOST_BYTES, SampleFile
from megatron_rl.analysis.report.traces import summarize_trace
from megatron_rl.errors import InputError
from megatron_rl.observe import metrics, run_folder, samples
from megatron_rl.observe import trace as trace_file
from megatron_rl.observe.run_folder import SavedConfig
from megatron_rl.shared.records import audit_log
from megatron_rl.shared.records.audit_check import verify
from megatron_rl.shared.records.audit_report import describe_weaker_proof

# A report that follows a run spends a twentieth of its time on the audit log, and another on the trace.
_REST = 20.0
# The number of breaches that are shown one by one.
_MOST_BREACHES = 200


class RunFiles:
    """The files of one run, read again if they have grown."""

    def __init__(self, label: str, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the run's files; `path` is its folder, or its file of metrics."""
        self.label = label
        self._metrics = path / metrics.FILE_NAME if path.is_dir() else path
        self._samples = SampleFile(self._metrics.with_name(samples.FILE_NAME))
        log, traces = self._metrics.with_name(audit_log.FILE_NAME), self._metrics.parent / trace_file.FOLDER
        self._audit = _Costly(lambda: _check(log), lambda: _sign_all(log.parent, f"{log.stem}*"), clock)
        self._trace = _Costly(lambda: summarize_trace(log.parent), lambda: _sign_all(traces, "*.jsonl"), clock)

    def signature(self) -> tuple[object, ...]:
        """Return a value that changes whenever a file of the run does."""
        folder = self._metrics.parent
        names = (
            self._metrics.name, samples.FILE_NAME, run_folder.CONFIG_FILE, audit_log.FILE_NAME, run_folder.DRIFT_FILE,
        )  # fmt: skip
        return (*(_sign(folder / name) for name in names), _sign_all(folder / trace_file.FOLDER, "*.jsonl"))

    def read_config(self) -> SavedConfig | None:
        return run_folder.read_saved_config(self._metrics.with_name(run_folder.CONFIG_FILE))

    def read(self, config: SavedConfig | None, peak_tflops: float | None) -> dict[str, Any]:
        """Read all but the samples."""
        records = metrics.read_metrics(self._metrics)
        known = config or SavedConfig()
        peak = None if peak_tflops is None else peak_tflops * 1e12
        curves = collect_curves(records)
        curves |= derive_throughput(records, known.num_devices, known.num_engine_devices, known.model, peak)
        return {
            "label": self.label,
            "folder": str(self._metrics.parent),
            # The last line may be an evaluation alone, which does not count.
            "num_iterations": sum("reward" in record or "loss" in record for record in records),
            "pass_name": metrics.pass_name(records),
            "start_seconds": metrics.start_seconds(records),
            # For each name, the versions in which it was not finite.
            "nonfinite": collections.Counter(name for record in records for name in record.get("nonfinite", ())),
            "curves": curves,
            "times": collect_times(records),
            "devices": {"trainer": known.num_devices, "engines": known.num_engine_devices},
            "parameters": None if known.model is None else known.model.num_parameters,
            "given": None if config is None else run_folder.list_given(config),
            "audit": self._audit.read(),
            "trace": self._trace.read(),
            "drift": _read_drift(self._metrics.parent),
        }

    def read_rollouts(self, most_bytes: int) -> dict[str, Any]:
        """Read the samples for which the report has room."""
        self._samples.update()
        return self._samples.choose(most_bytes)


class ReportData:
    """The data of a report: a summary that the page draws from, and the rollouts of each run."""

    def __init__(self, runs: Mapping[str, Path], peak_tflops: float | None = None) -> None:
        self._runs = [RunFiles(label, path) for label, path in runs.items()]
        self._peak_tflops = peak_tflops

    def signature(self) -> tuple[object, ...]:
        """Return a value that changes whenever a file of the runs does."""
        return tuple(run.signature() for run in self._runs)

    def read(self) -> dict[str, Any]:
        """Read all but the samples."""
        configs = [run.read_config() for run in self._runs]
        runs = [run.read(config, self._peak_tflops) for run, config in zip(self._runs, configs, strict=True)]
        return {
            "runs": runs,
            "peak_tflops": self._peak_tflops,
            "differences": run_folder.find_differences(configs) if len(configs) > 1 else [],
        }

    def __len__(self) -> int:
        return len(self._runs)

    def read_rollouts(self, run: int) -> dict[str, Any]:
        """Read the samples of a run, given its number; all runs share the report's room."""
        return self._runs[run].read_rollouts(MOST_BYTES // len(self._runs))


class _Costly:
    """A result that takes long to find. While its file grows, it is found again only after 20 times as long."""

    def __init__(self, find: Callable[[], Any], sign: Callable[[], object], clock: Callable[[], float]) -> None:
        self._find = find
        self._sign = sign
        self._clock = clock
        self._signature: object = None
        self._found: Any = None
        self._due = float("-inf")

    def read(self) -> Any:
        """Return the last result, or find it again if that is due."""
        signature = self._sign()
        if signature != self._signature and self._clock() >= self._due:
            begun = self._clock()
            self._found = self._find()
            self._due = self._clock() + _REST * (self._clock() - begun)
            self._signature = signature
        return self._found


def _check(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        report = verify(path)
    except InputError as error:
        return {"problem": str(error)}
    return {
        "num_lines": report.num_lines,
        "num_complete": sum(item.outcome == "complete" for item in report.iterations),
        "num_iterations": len(report.iterations),
        "num_responses": sum(item.num_responses for item in report.iterations),
        "num_starts": report.num_starts,
        "num_recovered": report.num_recovered,
        "proofs": dataclasses.asdict(report.proofs),
        "weaker": describe_weaker_proof(report.proofs) if report.proofs.num_weaker else None,
        "head": report.head,
        "num_breaches": len(report.breaches),
        "breaches": [
            [report.place(breach.line), str(breach.name.value), breach.detail]
            for breach in report.breaches[:_MOST_BREACHES]
        ],
    }


def _read_drift(run: Path) -> Any:
    try:
        return msgspec.to_builtins(run_folder.read_findings(run))
    except InputError as error:
        return {"problem": str(error)}


def _sign_all(folder: Path, pattern: str) -> tuple[object, ...]:
    return tuple((path.name, _sign(path)) for path in sorted(folder.glob(pattern)))


def _sign(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
