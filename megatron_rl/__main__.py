"""Train a language model on Megatron: `torchrun -m megatron_rl FLAGS`, with the flags of docs/flags.md."""

import sys

from megatron_rl.trainer.loop.entry import Entry


def main(entry: Entry) -> int:
    """Return the exit code: docs/operations.md lists them."""
    late = entry.late()
    try:
        from megatron_rl.command_line.parse import parse_run

        settings = entry.parse(parse_run)
    finally:
        late.cancel()
    return entry.train(settings)


# Saving starts processes that import this file again.
if __name__ == "__main__":
    sys.exit(Entry("megatron_rl").run(main))
