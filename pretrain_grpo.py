"""Train a language model with GRPO on Megatron: torchrun pretrain_grpo.py <Megatron's flags and ours, docs/flags.md>"""

import os
import sys

from megatron_rl.errors import ExitCode, MegatronRLError
from megatron_rl.training.watch import Watch

_PATIENCE_SECONDS = 60.0


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
        watch.tell(error)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        _say("interrupted")
        watch.tell(interrupt)
        return ExitCode.INTERRUPTED
    except SystemExit as ended:
        # What is wrong with the command line was said. Rank 0 finds the same, and what is wrong on its host.
        if ended.__cause__ is not None:
            watch.tell(ended.__cause__, _PATIENCE_SECONDS)
        raise
    watch.close()
    return code


def _run(watch: Watch) -> int:
    from megatron_rl.arguments import parse_run
    from megatron_rl.describe import print_config
    from megatron_rl.saying import said_once

    with said_once(_say):
        settings = parse_run()
    if settings.run.print_config:
        if os.environ.get("RANK", "0") == "0":
            print(print_config(settings), end="")
        return ExitCode.OK
    # Megatron is imported once the platform is installed, which parsing does.
    from megatron_rl.training.run import train

    return train(settings, watch=watch)


def _say(text: str) -> None:
    print(f"pretrain_grpo.py: {text}", file=sys.stderr, flush=True)


# Saving starts processes that import this file again.
if __name__ == "__main__":
    sys.exit(main())
