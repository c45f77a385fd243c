"""What the loop tells people of an iteration and warn them of."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.config import ObserveConfig
from megatron_rl.observe.progress import Progress
from megatron_rl.training.reporter import Reporter, reporter_of


class Said(Progress):
    """What was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def reporter(folder: Path, **observe: Any) -> Reporter:
    settings = SimpleNamespace(
        observe=ObserveConfig(progress="none", **observe),
        rollout=SimpleNamespace(dtype=None),
        architecture=SimpleNamespace(dtype="float32"),
    )
    return reporter_of(settings, folder, 0, 1, 2, lambda ids: " ".join(map(str, ids)))


def slots(*batches: list[SimpleNamespace]) -> SimpleNamespace:
    return SimpleNamespace(of_all=lambda: [SimpleNamespace(parts=parts) for parts in batches])


@pytest.mark.parametrize(("given", "difference", "is_warned"), [
    (None, 5e-4, False), (None, 2e-3, True), (0.0, 5e-4, True), (0.0, 0.0, False), (0.1, 2e-3, False),
])  # fmt: skip
def test_a_mismatch_above_what_was_given_or_what_the_precision_explains_is_warned_of(
    tmp_path, given, difference, is_warned
):
    to = reporter(tmp_path, mismatch_warning=given, log_samples=0)
    to._progress = said = Said()
    metrics = {"version": 0, "mismatch": {"mean": difference}, "groups": 2, "reward": {"all_equal_groups": 0}}
    to.iteration(0, metrics, slots())
    to.close()
    assert any("--rollout-mismatch-warning" in line for line in said.lines) == is_warned
