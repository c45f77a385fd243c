"""Train a language model with GRPO on Megatron: torchrun pretrain_grpo.py <Megatron's flags and ours, docs/flags.md>"""

import sys

from megatron_rl.trainer.loop.entry import Entry


def main(entry: Entry) -> int:
    """Return the exit code: docs/operations.md lists them."""
    late = entry.late()
    try:
        from megatron_rl.config.command_line.parse import parse_run

        settings = entry.parse(parse_run)
    finally:
        late.cancel()
    return entry.train(settings)


# Saving starts processes that import this file again.
if __name__ == "__main__":
    sys.exit(Entry("pretrain_grpo.py").run(main))
