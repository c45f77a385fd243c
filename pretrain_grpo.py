"""Train a language model with GRPO on Megatron: torchrun pretrain_grpo.py <Megatron's flags and ours, docs/flags.md>"""

import sys

from megatron_rl.errors import ExitCode, MegatronRLError, UsageError
from megatron_rl.training.watch import Watch

# Less than what a rank that is gone is noticed within.
_PATIENCE_SECONDS = 15.0


def main() -> int:
    """Returns the exit code: docs/operations.md lists them."""
    watch = Watch()
    try:
        # Before anything that takes time: from here on the other ranks notice when this one is gone.
        watch = Watch.of_environment()
        code = _run(watch)
    except MegatronRLError as error:
        for problem in error.problems:
            _say(problem)
        # Rank 0 finds the same in the command line, and what is wrong on its host.
        watch.tell(error, patience=_PATIENCE_SECONDS if isinstance(error, UsageError) else 0.0)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        _say("interrupted")
        watch.tell(interrupt)
        return ExitCode.INTERRUPTED
    watch.close()
    return code


def _run(watch: Watch) -> int:
    from megatron_rl.arguments.command_line import parse_run
    from megatron_rl.arguments.describe import print_config
    from megatron_rl.arguments.saying import said_once

    with said_once(_say):
        settings = parse_run()
    if settings.run.print_config:
        if watch.rank == 0:
            print(print_config(settings), end="")
        return ExitCode.OK
    # Megatron is imported once the platform is installed, which parsing does.
    from megatron_rl.training.build import train

    return train(settings, watch=watch)


def _say(text: str) -> None:
    print(f"pretrain_grpo.py: {text}", file=sys.stderr, flush=True)


# Saving starts processes that import this file again.
if __name__ == "__main__":
    sys.exit(main())
