"""Test the demo for three seeds and three layouts, with a control whose rewards say nothing. 40 minutes.

python -m examples.arithmetic.learning [--out FOLDER]
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from examples.arithmetic.demo import LAYOUTS
from megatron_rl.analysis.picture import picture

SEEDS = (0, 1, 2)
# Accuracy on the held-out problems: at most before, at least after, and at most gained by the control.
BEFORE, AFTER, CONTROL = 0.45, 0.9, 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("learning"))
    arguments = parser.parse_args()
    rows = {}
    for seed in SEEDS:
        for layout in LAYOUTS:
            rows[f"{layout}, seed {seed}"] = _run(arguments.out / f"{layout}-{seed}", layout, seed)
    sync = _run(arguments.out / "sync", "dp2", SEEDS[0], "--schedule", "sync")
    control = _run(arguments.out / "control", "dp2", SEEDS[0], reward="shuffled")
    runs = {"periodic": arguments.out / f"dp2-{SEEDS[0]}" / "run", "synchronous": arguments.out / "sync" / "run"}
    picture(runs, arguments.out / "curves.png")
    print(f"\n{'':<20}{'before':>10}{'after':>10}")
    for name, (before, after) in {**rows, "synchronous": sync, "control": control}.items():
        print(f"{name:<20}{before:>10.1%}{after:>10.1%}")
    print(f"the curves of both schedules: {arguments.out / 'curves.png'}")
    learned = all(before <= BEFORE and after >= AFTER for before, after in rows.values())
    if not learned or control[1] - control[0] >= CONTROL:
        sys.exit(f"wanted: from at most {BEFORE} to at least {AFTER}, and less than {CONTROL} gained by the control")


def _run(out: Path, layout: str, seed: int, *flags: str, reward: str = "right_answer") -> tuple[float, float]:
    words = ["--layout", layout, "--seed", str(seed), "--out", str(out), "--reward", reward, "--", *flags]
    subprocess.run([sys.executable, "-m", "examples.arithmetic.demo", *words], check=True)
    result = json.loads((out / "result.json").read_text())
    return result["before"], result["after"]


if __name__ == "__main__":
    main()
