"""python -m megatron_rl.sidecar.agent"""

import os
import sys

from megatron_rl.errors import exit_checked
from megatron_rl.sidecar import parent


def _run() -> int:
    from megatron_rl.sidecar.agent.main import run_from_words

    return run_from_words(sys.argv[1:])


if __name__ == "__main__":
    # An agent that a launcher starts may be tied to it, so that it ends with its allocation.
    if parent.VARIABLE in os.environ:
        parent.tie()
    exit_checked("megatron_rl.sidecar.agent", _run)
