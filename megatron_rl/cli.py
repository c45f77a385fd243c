"""The command `megatron-rl`."""

import importlib
import os
import select
import sys
from collections.abc import Callable

from megatron_rl.errors import ExitCode, MegatronRLError, packages_checked, room_checked
from megatron_rl.versions import find_docs, leave_backends_to_platforms

# The module and the function that run each command, as MODULE:FUNCTION, and a line of help.
_COMMANDS = {
    "audit": ("megatron_rl.commands.audit:main", "check the audit log of a run: who sampled what, under which weights"),
    "convert": ("megatron_rl.commands.convert:main", "convert weights between Hugging Face's format and Megatron's"),
    "doctor": ("megatron_rl.commands.doctor:main", "show platform, versions, what is missing, and what to do"),
    "drift": (
        "megatron_rl.drift.command:main",
        "find the parts of engines and the trainer that differ from their definition, and why",
    ),
    "explain": ("megatron_rl.analysis.commands:explain", "say what of a run is out of bounds, and the flags to try"),
    "hosts": ("megatron_rl.commands.hosts:main", "show the hosts of a live run, and what their engines do"),
    "launch": ("megatron_rl.launch.command:main", "start a run on many hosts, by Slurm or Kubernetes"),
    "ledger": (
        "megatron_rl.analysis.commands:ledger",
        "account for every second of a run's ranks and engines, by cause",
    ),
    "patch": (
        "megatron_rl.commands.patched_tree:main",
        "let the scripts of a Megatron-LM tree train with GRPO, or take that back",
    ),
    "picture": ("megatron_rl.analysis.commands:picture", "draw the curves of runs, and where their time went"),
    "report": (
        "megatron_rl.analysis.commands:report",
        "write a page about runs: curves, rollouts, audit; or follow live ones",
    ),
    "serve": ("megatron_rl.commands.serve:main", "serve the policy of a run to lm-eval, Inspect or a chat client"),
    "trace": ("megatron_rl.analysis.commands:trace", "write what every process of a run did when, for ui.perfetto.dev"),
    "translate": (
        "megatron_rl.migrate.translate:main",
        "print our command line for a run of slime, Megatron-LM, verl, NeMo-RL or TRL",
    ),
    "try-agent": (
        "megatron_rl.commands.try_agent:main",
        "have an agent act once, with a stand-in policy that calls its tools",
    ),
    "verify": ("megatron_rl.verify.command:main", "compare a running vLLM server's weights with a folder, bit for bit"),
}


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code. An error that a user can correct is printed without a traceback."""
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not _is_cut_off():
            raise
        # Python would complain once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK


def _is_cut_off() -> bool:
    """Check whether the reader of the output has closed it, for instance a `head` that has read enough."""
    poll = select.poll()
    # No events are asked for: a closed reading end is always reported.
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(0))


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return ExitCode.OK if arguments else ExitCode.USAGE
    command, *rest = arguments
    if command not in _COMMANDS:
        print(f"megatron-rl: unknown command {command!r}\n{_usage()}", file=sys.stderr)
        return ExitCode.USAGE
    leave_backends_to_platforms()
    try:
        with room_checked(), packages_checked():
            return _load(command)(rest)
    except MegatronRLError as error:
        for problem in error.problems:
            print(f"megatron-rl {command}: {problem}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"megatron-rl {command}: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED


def _load(command: str) -> Callable[[list[str]], int]:
    # Imported only when it is needed, so that a command does not wait for, or fail with, the packages of another.
    module, _, function = _COMMANDS[command][0].partition(":")
    return getattr(importlib.import_module(module), function)


def _usage() -> str:
    commands = "\n".join(f"  {name:<10} {text}" for name, (_, text) in _COMMANDS.items())
    docs = find_docs()
    place = "" if docs is None else f"\n\nPages that are named docs/NAME.md are in {docs}."
    return f"usage: megatron-rl COMMAND ...\n\n{commands}\n\n`torchrun -m megatron_rl` trains.{place}"


if __name__ == "__main__":
    sys.exit(main())
