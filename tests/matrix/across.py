"""Train the same on each version of megatron-core, compare the numbers, and read each other's checkpoints.

    python -m tests.matrix.across write FOLDER NAME [quick]     # train, keep the numbers and the checkpoints
    python -m tests.matrix.across read FOLDER NAME [OTHER ...]  # resume from those of the others, or of these
    python -m tests.matrix.across compare FOLDER NAME           # all others with NAME, as JSON

The first writer draws the models, so that all train the same.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_rl import platforms

LAYOUTS = {
    "qwen3": ("TP2+distopt", "PP2xVPP2", "CP2+distopt"),
    "qwen3_moe": ("EP2", "DP2+distopt"),
}
# In which both are trained for each change.
QUICK = {"qwen3": ("PP2xVPP2",), "qwen3_moe": ("EP2",)}


def write(folder: Path, name: str, quick: str = "") -> None:
    """Train three updates in each layout, save, train two more.

    Keep log-probs and gradients, of three models in one too; the quick part trains alone.
    """
    from tests import hf_models
    from tests.distributed.test_training_checkpoint import LAYOUTS as WORDS
    from tests.distributed.test_training_checkpoint import write as train
    from tests.ranks import run_ranks

    numbers: dict[str, torch.Tensor] = {}
    for model, layouts in (QUICK if quick else LAYOUTS).items():
        if not (folder / model).exists():
            hf_models.draw(model, folder / model)
        out = folder / name / model
        trained = run_ranks(train, 2, folder / model, out, {layout: WORDS[layout] for layout in layouts})[0]
        numbers |= _flatten(model, trained)
    if not quick:
        numbers |= _compute(folder, name)
    torch.save(numbers, folder / name / "numbers.pt")


def _compute(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Compute log-probs and gradients at the start, and those of three models in one pass."""
    from tests.distributed import parity, test_tri_model
    from tests.ranks import run_ranks

    numbers: dict[str, torch.Tensor] = {}
    (dense, experts) = (("TP2", "TP2+SP", "PP2", "CP2"), ("EP2", "PP2"))
    for names, model in ((dense, "qwen3"), (experts, "qwen3_moe")):
        for (layout, _), (one, _) in run_ranks(parity.run_layouts, 2, names, {model: folder / model})[0].items():
            numbers |= _flatten(f"{model} {layout} at the start", vars(one))
    problem = test_tri_model.draw_problem(folder / name / "roles")
    pipeline = {"PP2": test_tri_model.LAYOUTS["PP2"]}
    roles = run_ranks(test_tri_model.run, 2, test_tri_model.both(pipeline, problem))[0]
    test_tri_model.check("PP2", roles)
    numbers |= _flatten("roles PP2", {"log-probs": roles["PP2", "fused"].log_probs})
    return numbers | _flatten("roles PP2", {"gradients": roles["PP2", "fused"].gradients})


def read(folder: Path, name: str, *others: str) -> None:
    """Resume from checkpoints that others wrote; return the differences from how their writers continued."""
    from tests.distributed.test_training_checkpoint import LAYOUTS as WORDS
    from tests.distributed.test_training_checkpoint import resume
    from tests.ranks import RanksError, run_ranks

    told = {}
    for other in others or _names(folder):
        written = torch.load(folder / other / "numbers.pt")
        differences: list[str] = []
        for model, layouts in LAYOUTS.items():
            layouts = [layout for layout in layouts if any(key.startswith(f"{model} {layout} ") for key in written)]
            assert layouts, f"{other} trained {model} in no layout"
            pairs = [(layout, layout) for layout in layouts]
            words = {layout: WORDS[layout] for layout in layouts}
            try:
                resumed = run_ranks(resume, 2, folder / model, folder / other / model, words, pairs)[0]
            except RanksError as error:
                differences.append(next(line for line in str(error).splitlines() if "Error: " in line))
                continue
            went_on = {layout: result for (layout, _), (_, result) in resumed.items()}
            numbers = _flatten(model, went_on)
            differences += [key for key, value in numbers.items() if not torch.equal(value, written[key])]
        told[other] = differences
    (folder / name / "read.json").write_text(json.dumps(told))


def compare(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    """Compare each version with NAME: tensors, those that differ, and the largest difference of each."""
    reference = torch.load(folder / name / "numbers.pt")
    result = {}
    for other in _names(folder):
        numbers = torch.load(folder / other / "numbers.pt")
        assert numbers.keys() == reference.keys()
        different = {
            key: float((value.double() - reference[key].double()).abs().max() / reference[key].double().abs().max())
            for key, value in numbers.items()
            if not torch.equal(value, reference[key])
        }
        result[other] = {"tensors": len(numbers), "different": different}
    return result


def _flatten(key: str, value: Any) -> dict[str, torch.Tensor]:
    """Return every tensor and number in a value, by the names on the way."""
    if torch.is_tensor(value):
        return {key: value}
    if isinstance(value, int | float):
        return {key: torch.tensor(value, dtype=torch.float64)}
    if isinstance(value, dict):
        parts = [*value.items()]
    elif isinstance(value, list | tuple):
        parts = [*enumerate(value)]
    else:
        parts = [*vars(value).items()] if hasattr(value, "__dict__") else []
    return {name: tensor for part, inner in parts for name, tensor in _flatten(f"{key} {part}", inner).items()}


def _names(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("*/numbers.pt"))


def main() -> None:
    command, folder, name = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if command == "compare":
        print(json.dumps(compare(folder, name)))
        return
    platforms.select("cpu").install()
    (folder / name).mkdir(parents=True, exist_ok=True)
    {"write": write, "read": read}[command](folder, name, *sys.argv[4:])


if __name__ == "__main__":
    main()
