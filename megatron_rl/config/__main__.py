"""python -m megatron_rl.config FLAGS: check the command line of a run, and print its settings."""

from megatron_rl.errors import exit_checked


def _run() -> int:
    from megatron_rl.command_line import parse as command_line

    return command_line.main()


if __name__ == "__main__":
    exit_checked("megatron_rl.config", _run)
