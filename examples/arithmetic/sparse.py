"""Train the demo's task with rare rewards: do dynamic sampling, a higher upper clip or a critic help? 40 minutes.

The solutions of the warm-up forget nearly every carry, so most groups are all right (no carries) or all wrong.

python -m examples.arithmetic.sparse [--seeds 0 1] [--out FOLDER]
"""

import argparse
from pathlib import Path

from examples.arithmetic.curves import add_flags, compare

FORGOTTEN = 0.98
# In later updates of an iteration ratios leave 1, and the clipping matters.
FLAGS = ("--global-batch-size", "256", "--micro-batch-size", "128")
FILTER = ("--grpo-filter-groups-with-same-reward",)
CLIP_HIGHER = ("--grpo-clamp-eps-upper", "0.28")
# With a critic responses need no group: 1,024 prompts with one each, in place of 64 with 16.
CRITIC = ("--algorithm", "ppo", "--critic", "policy", "--critic-lr", "1e-3", "--critic-warmup-iters", "2")
VARIANTS = {
    "neither": (),
    "clip-higher": CLIP_HIGHER,
    "dynamic sampling": FILTER,
    "both": (*FILTER, *CLIP_HIGHER),
    "a critic": (*CRITIC, "--grpo-prompts-per-step", "1024", "--grpo-group-size", "1"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, Path("sparse"))
    arguments = parser.parse_args()
    words = ("--forgotten", str(FORGOTTEN), "--", *FLAGS)
    compare({name: [*words, *flags] for name, flags in VARIANTS.items()}, arguments.seeds, arguments.out)


if __name__ == "__main__":
    main()
