"""Reads a run for the planner: its metrics, audit log, trace and configuration, and what the command line adds."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.analysis.plan.calibrate import MeasuredRun, RunLayout
from megatron_rl.analysis.plan.records import read_record, read_trace_record
from megatron_rl.errors import InputError
from megatron_rl.observe import metrics, run_folder
from megatron_rl.observe.run_folder import SavedConfig, check_samples
from megatron_rl.shared.records.append_file import read_lines
from megatron_rl.shared.records.audit_log import find_files, find_first_file, read_log_lines
from megatron_rl.sidecar.engines.scripted import read_script

_TRACE = "trace"
_ABSENT = "-"
# The word for a number of responses in flight that the sidecar chooses.
_CHOSEN = "auto"
_ENGINES = {"vllm": "batching", "scripted": "scripted"}


def read_run(folder: Path, given: Mapping[str, Any]) -> MeasuredRun:
    """Read a run. For its layout, `given` has precedence over the trace, and the trace over the configuration."""
    check_samples(folder, "groups to calibrate a plan on")
    config = run_folder.read_saved_config(folder / run_folder.CONFIG_FILE)
    layout: dict[str, Any] = {}
    if config is not None:
        layout = read_layout(config)
        if "engine" not in given and layout.get("engine") == "scripted":
            layout |= _read_script(folder, config)
    trace = read_trace_record(line for file in sorted((folder / _TRACE).glob("*.jsonl")) for line in read_lines(file))
    if trace is not None:
        layout["num_stages"] = trace.num_stages
        # If the sidecar was started by itself, the run's configuration does not describe the engines.
        layout["max_running"] = trace.max_running or layout.get("max_running")
    layout = {name: value for name, value in (layout | dict(given)).items() if value is not None}
    if "max_running" in layout:
        layout.setdefault("max_in_flight", 2 * layout["max_running"])
    record = read_record(folder.name, metrics.read_metrics(folder), _read_audit(folder))
    return MeasuredRun(record, RunLayout(**layout), trace)


def _read_audit(folder: Path) -> Iterator[dict[str, Any]]:
    for file in find_files(find_first_file(folder)).values():
        for number, line in enumerate(read_log_lines(file), 1):
            try:
                yield msgspec.json.decode(line, type=dict)
            except msgspec.DecodeError as error:
                raise InputError(f"{file}, line {number}: {error}; run `megatron-rl audit` on the run") from None


def read_layout(config: SavedConfig) -> dict[str, Any]:
    """Return the fields of a `RunLayout` that the configuration has."""
    layout: dict[str, Any] = {"trainer_devices": config.num_devices, "engine_devices": config.num_engine_devices}
    for name, (section, value, read) in _PLACES.items():
        text = _find(config, section, value)
        layout[name] = None if text is None else read(text)
    has_reference = float(_find(config, "algorithm", "kl_beta") or 0) != 0
    has_old_policy = int(_find(config, "iteration", "updates") or 1) > 1
    layout["num_frozen"] = has_reference + has_old_policy
    layout["output_share"] = _find_output_share(config)
    return {name: value for name, value in layout.items() if value is not None}


def _read_script(folder: Path, config: SavedConfig) -> dict[str, Any]:
    """Return the fields of a `RunLayout` that follow from the script of the run's engines."""
    name = _find(config, "rollout", "script")
    try:
        decoding = read_script(None if name is None else Path(name), None).decoding
    except InputError as error:
        raise InputError(
            f"{folder} has scripted engines, and {error}; or append ,engine=batching if their script had step_seconds, "
            "and ,engine=scripted if not"
        ) from None
    if decoding is None:
        return {}
    return {"engine": "batching", "step_seconds": (decoding.step, decoding.per_response)}


_PLACES: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "schedule": ("loop", "schedule", str),
    "num_stages": ("transformer", "pipeline_model_parallel_size", int),
    "num_virtual": ("transformer", "virtual_pipeline_model_parallel_size", int),
    "engine": ("rollout", "engine", _ENGINES.get),
    "max_running": ("rollout", "max_num_seqs", int),
    "max_in_flight": ("rollout", "max_in_flight", lambda text: None if text == _CHOSEN else int(text)),
    "is_chosen": ("rollout", "max_in_flight", lambda text: text == _CHOSEN),
    "is_shared": ("attention", "is_shared", lambda text: text == "True"),
}


def _find_output_share(config: SavedConfig) -> float | None:
    """Return the output layer's share of the parameters that a token is multiplied with."""
    hidden, vocabulary = (_find(config, "architecture", name) for name in ("hidden_size", "vocab_size"))
    if config.model is None or hidden is None or vocabulary is None:
        return None
    return int(hidden) * int(vocabulary) / config.model.num_multiplied


def _find(config: SavedConfig, section: str, name: str) -> str | None:
    value = config.sections.get(section, {}).get(name)
    return None if value is None or value.text == _ABSENT else value.text
