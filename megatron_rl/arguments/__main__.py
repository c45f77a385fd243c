"""python -m megatron_rl.arguments"""

import sys

from megatron_rl.arguments import command_line

if __name__ == "__main__":
    sys.exit(command_line.main())
