"""Every algorithm that has a name learns the demo's task: two updates an iteration, two seeds. 40 minutes.

python -m examples.arithmetic.algorithms [--names NAME ...] [--seeds 0 1] [--out FOLDER]

Runs whose result lies in the folder are not repeated.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from megatron_rl.config.algorithm import ALGORITHMS
from megatron_rl.observe.picture import picture

# Accuracy on the held-out problems after the demo's iterations.
AFTER = 0.85
# With one update an iteration every ratio is 1, and most losses have the same gradient.
FLAGS = ("--global-batch-size", "512")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path, default=Path("algorithms"))
    arguments = parser.parse_args()
    found = {
        name: [_run(arguments.out / f"{name}-{seed}", name, seed) for seed in arguments.seeds]
        for name in arguments.names
    }
    runs = {name: arguments.out / f"{name}-{arguments.seeds[0]}" / "run" for name in arguments.names}
    picture(runs, arguments.out / "curves.svg")
    print(f"\n{'held-out problems answered':<36}" + "".join(f"{f'seed {seed}':>10}" for seed in arguments.seeds))
    for name, accuracies in found.items():
        print(f"{name:<36}" + "".join(f"{accuracy:>10.1%}" for accuracy in accuracies))
    print(f"the curves of seed {arguments.seeds[0]}: {arguments.out / 'curves.svg'}")
    if min(min(accuracies) for accuracies in found.values()) < AFTER:
        sys.exit(f"wanted: at least {AFTER} of each")


def _run(out: Path, name: str, seed: int) -> float:
    result = out / "result.json"
    if not result.exists():
        words = ["--seed", str(seed), "--out", str(out), "--", "--algorithm", name, *FLAGS]
        subprocess.run([sys.executable, "-m", "examples.arithmetic.demo", *words], check=True)
    return json.loads(result.read_text())["after"]


if __name__ == "__main__":
    main()
