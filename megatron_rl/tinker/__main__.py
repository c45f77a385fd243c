"""A rank of a service, as `megatron-rl serve --tinker` starts it: `torchrun -m megatron_rl.tinker FLAGS`."""

import sys

from megatron_rl.trainer.loop.entry import Entry


def main(entry: Entry) -> int:
    """Return the exit code."""
    late = entry.late()
    try:
        from megatron_rl.command_line.parse import parse_run

        settings = entry.parse(parse_run)
    finally:
        late.cancel()
    # These import Megatron, and parsing has installed the platform before.
    from megatron_rl.tinker.worker import build_worker
    from megatron_rl.trainer.loop.rank import Recipe

    return entry.train(settings, Recipe(build_loop=build_worker, sidecar="megatron_rl.tinker.sidecar"))


# Saving starts processes that import this file again.
if __name__ == "__main__":
    sys.exit(Entry("megatron-rl serve").run(main))
