"""Train a language model with GRPO on Megatron: torchrun pretrain_grpo.py <Megatron's flags and ours, docs/flags.md>"""

import sys
import threading
import time

from megatron_rl.errors import ExitCode, MegatronRLError, UsageError
from megatron_rl.training.watch import Watch, tell_launcher

# Less than what a rank that is gone is noticed within.
_PATIENCE_SECONDS = 15.0
_SILENCE_SECONDS = 5.0


def main() -> int:
    """Returns the exit code: docs/operations.md lists them."""
    begun, watch = time.monotonic(), Watch()
    try:
        # Before anything that takes time: from here on the other ranks notice when this one is gone.
        watch = Watch.of_environment()
        code = _run(watch, begun)
    except MegatronRLError as error:
        for problem in error.problems:
            _say(problem)
        tell_launcher("\n".join(error.problems))
        # Rank 0 finds the same in the command line, and what is wrong on its host.
        watch.tell(error, patience=_PATIENCE_SECONDS if isinstance(error, UsageError) else 0.0)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        _say("interrupted")
        watch.tell(interrupt)
        return ExitCode.INTERRUPTED
    watch.close()
    return code


def _run(watch: Watch, begun: float) -> int:
    from megatron_rl.arguments.command_line import parse_run
    from megatron_rl.arguments.describe import print_config
    from megatron_rl.arguments.saying import said_once

    said: list[str] = []

    def say(problem: str) -> None:
        _say(problem)
        said.append(problem)
        tell_launcher("\n".join(said))

    # Most of this is imports; on a busy machine, or from a network's disk, they take long.
    late = threading.Timer(_SILENCE_SECONDS, _say_late)
    late.daemon = True
    if watch.rank == 0 and "none" not in sys.argv:
        late.start()
    try:
        with said_once(say):
            settings = parse_run()
    finally:
        late.cancel()
    if settings.run.print_config:
        if watch.rank == 0:
            print(print_config(settings), end="")
        return ExitCode.OK
    # Megatron is imported once the platform is installed, which parsing does.
    from megatron_rl.observe.startup import Startup
    from megatron_rl.training.build import train

    return train(settings, watch=watch, startup=Startup(begun))


def _say_late() -> None:
    print(f"start {_SILENCE_SECONDS:6.1f} s  torch and Megatron are being imported", file=sys.stderr, flush=True)


def _say(text: str) -> None:
    print(f"pretrain_grpo.py: {text}", file=sys.stderr, flush=True)


# Saving starts processes that import this file again.
if __name__ == "__main__":
    sys.exit(main())
