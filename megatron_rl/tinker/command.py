"""`megatron-rl serve --tinker`: the ranks and engines of a run, for clients of Tinker's interface.

    megatron-rl serve --tinker [--nproc-per-node N] FLAGS

FLAGS are the flags of `torchrun -m megatron_rl`: model, layout, engines. Once it serves, it prints the address and the
file of the key. SIGTERM and Ctrl-C end it. If a process of it is lost, it starts again and continues from its journal.
"""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from megatron_rl.errors import ExitCode, UsageError
from megatron_rl.sidecar import parent

# Another start would end in the same way.
_FINAL = (ExitCode.OK, ExitCode.USAGE, ExitCode.ENVIRONMENT, ExitCode.INPUT, ExitCode.INTERRUPTED)
_SHORT_SECONDS, _MOST_SHORT = 60.0, 3
"""After this many short lives in a row another one would end in the same way."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "megatron-rl serve", None, __doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--tinker", action="store_true", help="serve Tinker's interface")
    parser.add_argument("--nproc-per-node", type=int, default=1, help="the ranks on this host; 1 if not given")
    arguments, flags = parser.parse_known_args(argv)
    if "--stage" in flags:
        raise UsageError("--stage is set by this command: drop it")
    count, launcher = arguments.nproc_per_node, list[str]()
    if count > 1:
        launcher = ["torch.distributed.run", "--nproc-per-node", str(count), "-m"]
    words = ["-m", *launcher, "megatron_rl.tinker", "--stage", "serve", *flags]
    return _run([sys.executable, *words])


def _run(command: Sequence[str]) -> int:
    """Run the ranks, and start them again until they end as they were asked, or keep ending soon after their start."""
    asked, num_short = [], 0
    while True:
        begun = time.monotonic()
        # They end with this process, however it ends.
        with subprocess.Popen(command, preexec_fn=parent.tie) as ranks:

            def end(number: int, _: Any, ranks: "subprocess.Popen[bytes]" = ranks) -> None:
                asked.append(number)
                ranks.send_signal(number)

            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, end)
            code = ranks.wait()
        num_short = num_short + 1 if time.monotonic() - begun < _SHORT_SECONDS else 0
        if asked or code in _FINAL or num_short == _MOST_SHORT:
            return code
        print(f"megatron-rl serve: the ranks ended with exit code {code}, and are started again", file=sys.stderr)
