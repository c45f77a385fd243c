"""A whole run whose engine drafts tokens: proved and trained as any other."""

import re

import pytest

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.shared.records.audit_check import verify
from tests.e2e import loop


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_whose_engine_drafts_tokens_is_proved_and_trained_as_any_other(tmp_path):
    world = loop.make_world(tmp_path)
    loop.draw_model(tmp_path / "wide", head_dim=32)
    folder = tmp_path / "drafts"
    folder.mkdir()
    words = world.words(
        "drafts", hf_model=tmp_path / "wide", rollout_engine="vllm", rollout_num_engines=1,
        rollout_folder=folder / "run", rollout_speculative="ngram", rollout_speculative_tokens=3,
        rollout_temperature=0.7, train_iters=3,
    )  # fmt: skip
    with loop.running(folder, 1, words) as ranks:
        assert ranks.wait(600) == [0], ranks.text()
    report = verify(folder / "run")
    assert not report.breaches
    assert [item.outcome for item in report.iterations] == ["complete"] * 3
    assert len([row for row in read_metrics(folder / "run") if "loss" in row]) == 3
    log = (folder / "run" / "sidecar.log").read_text()
    assert re.search(r"engine engine-0: \d+ of \d+ drafted tokens were accepted \(\d+ %\), with version 0", log)
