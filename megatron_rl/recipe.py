"""Start of scripts of Megatron-LM: `torchrun -m megatron_rl.recipe pretrain_gpt.py FLAGS`, flags of both.

A patched script calls `start` in its first line.
"""

import sys

from megatron_rl.trainer.recipe.script import run, start

__all__ = ["run", "start"]

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
