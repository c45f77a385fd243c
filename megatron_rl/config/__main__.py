"""python -m megatron_rl.config"""

import sys

from megatron_rl.config.command_line import parse as command_line

if __name__ == "__main__":
    sys.exit(command_line.main())
