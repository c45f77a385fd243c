"""The sidecar's trace: its recorder, and the line that ends an iteration.

The event loop appends a constant number of spans a group, and encodes a line when an iteration is complete.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_rl.observe.trace import SIDECAR, Recorder, TraceFile, find_own_offset
from megatron_rl.shared.records.append_file import AppendFailed

_log = logging.getLogger(__name__)


class SidecarTrace:
    """The trace of a sidecar; empty without a folder. A file that cannot be written ends the trace."""

    def __init__(self, run: Path | None = None, engines: Callable[[], Mapping[str, int]] = dict) -> None:
        """Open the trace; `engines` returns the responses that each engine samples at a time."""
        self.recorder = Recorder() if run is not None else Recorder(most=0)
        self._engines = engines
        self._file = TraceFile(run, SIDECAR, {"offset": find_own_offset(), "error": None}) if run is not None else None
        self._version: int | None = None

    def begin(self, version: int) -> None:
        """Begin a version that is published; drop the file's lines of this version and later ones."""
        if self._file is None:
            return
        if self._version is None:
            # Earlier spans belong to the start, and to no iteration.
            self.recorder.restart()
        if self._file.last_version >= version:
            self._file.restart(version)
        self._version = version

    def end_last(self) -> None:
        """Write the spans after the last iteration, if there are any."""
        if self.recorder.has_spans:
            self.end()

    def end(self) -> None:
        """Write the spans since the last line."""
        if self._file is None or self._version is None:
            return
        try:
            self._file.write(self._version, self.recorder.take(), engines=dict(self._engines()))
        except AppendFailed as error:
            _log.warning("the trace ends here: %s", error)
            self.close()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None
