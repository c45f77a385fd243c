"""python -m megatron_rl.config FLAGS: check the command line of a run, and print its settings."""

import sys

from megatron_rl.command_line import parse as command_line

if __name__ == "__main__":
    sys.exit(command_line.main())
