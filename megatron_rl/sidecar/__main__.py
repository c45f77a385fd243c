"""python -m megatron_rl.sidecar"""

import os
import sys

from megatron_rl.errors import exit_checked
from megatron_rl.sidecar import parent


def _run() -> int:
    from megatron_rl.sidecar.main import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    # A sidecar that a trainer started ends with that trainer; one that a person started stays.
    if parent.VARIABLE in os.environ:
        parent.tie()
    exit_checked("megatron_rl.sidecar", _run)
