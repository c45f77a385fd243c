"""Train a language model with GRPO on Megatron: torchrun pretrain_grpo.py <Megatron's flags and ours, docs/flags.md>"""

import sys

from megatron_rl.__main__ import main
from megatron_rl.trainer.loop.entry import Entry

# Saving starts processes that import this file again.
if __name__ == "__main__":
    sys.exit(Entry("pretrain_grpo.py").run(main))
