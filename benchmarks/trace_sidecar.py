"""The sidecar of the benchmark `trace`: it records nothing of odd iterations.

python -m benchmarks.trace_sidecar <flags of megatron_rl.sidecar>
"""

import sys

from megatron_rl.errors import ExitCode
from megatron_rl.observe.trace import MOST_SPANS
from megatron_rl.sidecar import main as sidecar
from megatron_rl.sidecar import parent
from megatron_rl.sidecar.recorder import SidecarTrace


def main() -> int:
    begin, end = SidecarTrace.begin, SidecarTrace.end

    def begin_every_second(self: SidecarTrace, version: int) -> None:
        begin(self, version)
        self.recorder._most = 0 if version % 2 else MOST_SPANS

    def end_every_second(self: SidecarTrace) -> None:
        if self._version is not None and self._version % 2:
            self.recorder.restart()
        else:
            end(self)

    SidecarTrace.begin = begin_every_second  # type: ignore[method-assign]
    SidecarTrace.end = end_every_second  # type: ignore[method-assign]
    parent.tie()
    return sidecar.main(sys.argv[1:]) or ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
