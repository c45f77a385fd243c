"""The problems: additions of two numbers of three digits, each number written from its last digit to its first.

347 + 285 = 632 is asked as `743+582=` and answered `236`. In this order each digit of the answer needs only the
digits to the left of it, as in adding on paper. The model must learn the carries: the solutions of its warm-up forget
most of them, the rewards do not.

python -m examples.arithmetic.task FOLDER --seed 0
"""

import argparse
import dataclasses
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

SMALLEST, LARGEST = 100, 999
FORGOTTEN = 0.75
"""The share of carries that a careless solution forgets."""
NUM_WARM_UP, NUM_VALIDATION, NUM_TRAIN, NUM_HELD_OUT = 32768, 512, 16384, 512


@dataclasses.dataclass(frozen=True)
class Problem:
    """One addition."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{_reversed(self.left)}+{_reversed(self.right)}="

    @property
    def answer(self) -> str:
        return _reversed(self.left + self.right)


@dataclasses.dataclass(frozen=True)
class Split:
    """Sets of problems of which no two share one; a + b and b + a count as the same."""

    warm_up: list[Problem]
    """The problems of supervised training, with careless solutions."""
    validation: list[Problem]
    """The problems that measure its progress."""
    train: list[Problem]
    """The prompts of GRPO."""
    held_out: list[Problem]
    """The problems that accuracy is measured on, before and after."""


def split(seed: int) -> Split:
    """Split the problems; the same seed gives the same sets."""
    problems = _distinct(random.Random(seed))
    # The measured problems are drawn first: another number of the rest leaves them as they are.
    held_out, validation, train, warm_up = (
        [next(problems) for _ in range(count)] for count in (NUM_HELD_OUT, NUM_VALIDATION, NUM_TRAIN, NUM_WARM_UP)
    )
    return Split(warm_up=warm_up, validation=validation, train=train, held_out=held_out)


def careless(problem: Problem, draw: random.Random, forgotten: float = FORGOTTEN) -> str:
    """Return a solution in which each carry into the tens or the hundreds is forgotten with this probability."""
    digits, carry = list[str](), 0
    for left, right in zip(_reversed(problem.left), _reversed(problem.right), strict=True):
        if digits and draw.random() < forgotten:
            carry = 0
        carry, digit = divmod(int(left) + int(right) + carry, 10)
        digits.append(str(digit))
    return "".join(digits) + "1" * carry


def write(problems: Sequence[Problem], path: Path, name: str) -> None:
    """Write a file for `--prompts` or `--eval-prompts`."""
    rows = (
        {"id": f"{name}-{number}", "prompt": problem.prompt, "answer": problem.answer}
        for number, problem in enumerate(problems)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_files(folder: Path, seed: int) -> tuple[Path, Path]:
    """Write the problems that GRPO trains on and those that it is measured on."""
    folder.mkdir(parents=True, exist_ok=True)
    sets = split(seed)
    paths = folder / "train.jsonl", folder / "held_out.jsonl"
    write(sets.train, paths[0], "train")
    write(sets.held_out, paths[1], "held-out")
    return paths


def _distinct(draw: random.Random) -> Iterator[Problem]:
    seen = set()
    while True:
        problem = Problem(draw.randint(SMALLEST, LARGEST), draw.randint(SMALLEST, LARGEST))
        same = frozenset((problem.left, problem.right))
        if same not in seen:
            seen.add(same)
            yield problem


def _reversed(number: int) -> str:
    return str(number)[::-1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write train.jsonl and held_out.jsonl.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for path in write_files(arguments.folder, arguments.seed):
        print(path)


if __name__ == "__main__":
    main()
