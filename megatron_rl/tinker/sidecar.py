"""The sidecar of a service: that of a run, with Tinker's interface beside it."""

import sys

from megatron_rl.errors import exit_checked
from megatron_rl.sidecar import parent


def _run() -> int:
    from megatron_rl.sidecar.main import main
    from megatron_rl.tinker.routes import open_front

    return main(sys.argv[1:], open_front)


if __name__ == "__main__":
    parent.tie()
    exit_checked("megatron_rl.sidecar", _run)
