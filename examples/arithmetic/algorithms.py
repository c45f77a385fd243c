"""Train every algorithm that has a name on the demo's task: two updates an iteration, all three roles. An hour.

python -m examples.arithmetic.algorithms [--names NAME ...] [--seeds 0 1] [--out FOLDER]
"""

import argparse
import sys
from pathlib import Path

from examples.arithmetic.curves import add_flags, compare
from megatron_rl.algorithm.library import PRESETS

# Accuracy on the held-out problems after the demo's iterations.
AFTER = 0.85
# With one update an iteration every ratio is 1, and most losses have the same gradient. The divergence adds the
# reference to the policy and to the weights that sampled.
FLAGS = ("--global-batch-size", "512", "--grpo-kl-beta", "0.001")
# Further flags of a name. RLOO's loss has no ratio, and a second update would not be a policy gradient: it makes one.
# GDPO's advantages are divided, and so would be a divergence in the loss.
MORE_FLAGS: dict[str, tuple[str, ...]] = {"rloo": ("--global-batch-size", "1024"), "gdpo": ("--grpo-kl-in", "reward")}
# A critic begins as the policy, and learns for some iterations before the policy does.
CRITIC = ("--critic", "policy", "--critic-warmup-iters", "2")
MORE_FLAGS |= {"ppo": CRITIC, "vapo": CRITIC}
# `opd` needs a teacher, and has its own example (`teacher`).
WITHOUT_TEACHER = [name for name in PRESETS if name != "opd"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", choices=WITHOUT_TEACHER, default=WITHOUT_TEACHER)
    add_flags(parser, Path("algorithms"))
    arguments = parser.parse_args()
    variants = {name: ["--", "--algorithm", name, *FLAGS, *MORE_FLAGS.get(name, ())] for name in arguments.names}
    found = compare(variants, arguments.seeds, arguments.out)
    if min(min(accuracies) for accuracies in found.values()) < AFTER:
        sys.exit(f"wanted: at least {AFTER} of each")


if __name__ == "__main__":
    main()
