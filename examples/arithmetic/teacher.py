"""Train a student half as wide as its teacher, from a start that forgets every carry: by rewards, and by the teacher.

Nearly no sample of the student has a carry, so rewards teach few in twice the updates. With --start untaught the
student's warm-up is too short to learn to add: nearly no sample is right, so rewards seldom give a gradient.

python -m examples.arithmetic.teacher [--start untaught] [--seeds 0 1] [--out FOLDER]
"""

import argparse
from pathlib import Path

from examples.arithmetic import model, warm_up
from examples.arithmetic.curves import add_flags, compare

STUDENT = ("--forgotten", "1", "--hidden-size", str(model.HIDDEN_SIZE // 2))
STARTS = {
    "careless": ((), ()),
    # It has more to learn, so an iteration has four updates, by rewards too.
    "untaught": (("--warm-up-steps", "40"), ("--global-batch-size", "256", "--micro-batch-size", "128")),
}
REWARDS = ("--train-iters", "200")
# Each response teaches alone: the same number of them answers more prompts.
OPD = (
    "--algorithm", "opd", "--train-iters", "100", "--grpo-prompts-per-step", "256", "--grpo-group-size", "4",
    "--lr", "2e-3",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", choices=STARTS, default="careless", help="what the student begins with")
    add_flags(parser, Path("teacher"))
    arguments = parser.parse_args()
    folder = arguments.out / "model"
    if not folder.exists():
        warm_up.make(folder, arguments.seeds[0], warm_up.Recipe(forgotten=0))
    opd = (*OPD, "--teacher", str(folder))
    variants = {
        "rewards": REWARDS,
        "the teacher, sampled tokens": opd,
        "the teacher, whole distributions": (*opd, "--opd-divergence", "reverse"),
    }
    words, updates = STARTS[arguments.start]
    runs = {name: [*STUDENT, *words, "--", *updates, *flags] for name, flags in variants.items()}
    compare(runs, arguments.seeds, arguments.out / arguments.start)


if __name__ == "__main__":
    main()
