"""The file in which `megatron-rl drift` leaves its findings in a run's folder, for the report."""

from pathlib import Path

import msgspec

from megatron_rl.errors import InputError
from megatron_rl.observe.run_folder import DRIFT_FILE as FILE_NAME
from megatron_rl.shared.records.append_file import write_private


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """The findings about an engine, or about the trainer."""

    name: str
    dtype: str
    difference: float
    """The mean difference of its log-probs from exact ones."""
    largest: str
    """The part with the largest effect."""
    causes: list[str]
    """The parts that are off by more than rounding, each with its layer and the reason."""


class DriftFindings(msgspec.Struct, frozen=True, kw_only=True):
    checkpoint: str
    num_tokens: int
    sides: list[Side]
    difference: float | None = None
    """The mean difference of the engine's log-probs from the trainer's; None if the trainer was left out."""


def write_findings(run: Path, findings: DriftFindings) -> None:
    """Write the file, in place of an earlier call's."""
    write_private(run / FILE_NAME, msgspec.json.format(msgspec.json.encode(findings)) + b"\n")


def read_findings(run: Path) -> DriftFindings | None:
    """Read the file; None if there is none."""
    path = run / FILE_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=DriftFindings)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}; move it away") from None
