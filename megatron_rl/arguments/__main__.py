"""python -m megatron_rl.arguments"""

import sys

from megatron_rl.arguments.command_line import main

if __name__ == "__main__":
    sys.exit(main())
