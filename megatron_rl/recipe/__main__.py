"""torchrun -m megatron_rl.recipe pretrain_gpt.py <the recipe's flags and ours>"""

import sys

from megatron_rl.recipe.script import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
