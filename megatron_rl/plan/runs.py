"""Reads a run for the planner: its metrics, audit log, trace and configuration, and what a person adds to them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.errors import InputError
from megatron_rl.observe import config_file, metrics
from megatron_rl.observe.run_folder import check_samples
from megatron_rl.plan.calibrate import MeasuredRun, RunLayout
from megatron_rl.plan.configured import read_layout
from megatron_rl.plan.records import read_record
from megatron_rl.plan.traces import read_trace
from megatron_rl.records.append_file import read_lines
from megatron_rl.records.audit_log import find_files, find_first_file, read_log_lines

_TRACE = "trace"


def read_run(folder: Path, given: Mapping[str, Any]) -> MeasuredRun:
    """Read a run; what is `given` of its layout comes before what its trace says, and that before its configuration."""
    check_samples(folder, "groups to calibrate a plan on")
    config = config_file.read(folder / config_file.FILE_NAME)
    layout = read_layout(config) if config is not None else {}
    trace = read_trace(line for file in sorted((folder / _TRACE).glob("*.jsonl")) for line in read_lines(file))
    if trace is not None:
        layout["num_stages"] = trace.num_stages
        # Of a sidecar that was started by itself, the configuration of the run does not know the engines.
        layout["max_running"] = trace.max_running or layout.get("max_running")
    layout = {name: value for name, value in (layout | dict(given)).items() if value is not None}
    if "max_running" in layout:
        layout.setdefault("max_in_flight", 2 * layout["max_running"])
    record = read_record(folder.name, metrics.read(folder), _read_audit(folder))
    return MeasuredRun(record, RunLayout(**layout), trace)


def _read_audit(folder: Path) -> Iterator[dict[str, Any]]:
    for file in find_files(find_first_file(folder)).values():
        for number, line in enumerate(read_log_lines(file), 1):
            try:
                yield msgspec.json.decode(line, type=dict)
            except msgspec.DecodeError as error:
                raise InputError(f"{file}, line {number}: {error}; `megatron-rl audit` says what is wrong") from None
