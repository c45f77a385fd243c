"""The entry point of a run: one line for each error, exit codes, ranks that notice when another is lost.

Importing this needs no torch, so that ranks already watch each other while torch is imported.
"""

import gc
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_rl.errors import ExitCode, MegatronRLError, UsageError, packages_checked, room_checked
from megatron_rl.trainer.loop.watch import Watch, tell_launcher
from megatron_rl.versions import leave_backends_to_platforms

if TYPE_CHECKING:
    from megatron_rl.command_line.run import RunSettings
    from megatron_rl.trainer.loop.rank import Recipe

# Less than lifelines.NOTICED_SECONDS, within which the loss of a rank is noticed.
_TIMEOUT_SECONDS = 15.0
_SILENCE_SECONDS = 5.0


class Entry:
    """One rank's process, from its start to its exit code. `name` is the prefix of the lines that it prints."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._begun = time.monotonic()
        self._watch = Watch()
        leave_backends_to_platforms()

    def run(self, action: Callable[["Entry"], int]) -> int:
        """Call `action` and return its exit code, or that of its error (docs/operations.md lists them)."""
        try:
            # Before anything that takes time: from here on the other ranks notice the loss of this one.
            self._watch = Watch.of_environment()
            with room_checked(), packages_checked():
                code = action(self)
        except MegatronRLError as error:
            for problem in error.problems:
                self.say(problem)
            tell_launcher("\n".join(error.problems))
            # Rank 0 finds the same mistakes in the command line, and others on its host: it may report first.
            self._watch.tell(error, timeout=_TIMEOUT_SECONDS if isinstance(error, UsageError) else 0.0)
            return error.exit_code
        except KeyboardInterrupt as interrupt:
            self.say("interrupted")
            self._watch.tell(interrupt)
            return ExitCode.INTERRUPTED
        self._watch.close()
        if not code:
            # Groups of ranks that only cycles refer to end their threads here. A thread of gloo's that releases a
            # tensor while Python ends would abort the process.
            gc.collect()
        return code

    def parse(self, parse: Callable[[], "RunSettings"]) -> "RunSettings":
        """Call `parse` and return the settings; all ranks together report each mistake once."""
        from megatron_rl.command_line.rank_store import report_once

        said: list[str] = []

        def say(problem: str) -> None:
            self.say(problem)
            said.append(problem)
            tell_launcher("\n".join(said))

        with report_once(say):
            return parse()

    def late(self) -> threading.Timer:
        """Start a timer that says that imports are still running; return it for the caller to cancel.

        Imports take most of a start: on a busy machine, or from a network disk, they take long. With --progress none
        the timer does not run.
        """
        text = f"start {_SILENCE_SECONDS:6.1f} s  torch and Megatron are being imported"
        timer = threading.Timer(_SILENCE_SECONDS, lambda: print(text, file=sys.stderr, flush=True))
        timer.daemon = True
        if self._watch.rank == 0 and "none" not in sys.argv:
            timer.start()
        return timer

    def train(self, settings: "RunSettings", recipe: "Recipe | None" = None) -> int:
        """Print the configuration if --print-config is given, else train. A recipe, if given, builds the model."""
        if settings.run.print_config:
            from megatron_rl.command_line.describe import print_config

            if self._watch.rank == 0:
                print(print_config(settings), end="")
            return ExitCode.OK
        # These import Megatron, and parsing has installed the platform before.
        from megatron_rl.observe.startup import Startup
        from megatron_rl.trainer.loop.run import train

        return train(settings, watch=self._watch, startup=Startup(self._begun), recipe=recipe)

    def say(self, text: str) -> None:
        print(f"{self.name}: {text}", file=sys.stderr, flush=True)
