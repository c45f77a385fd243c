"""A run whose reward is the example's: code in a sandbox, with tests."""

from pathlib import Path

import pytest

from examples import tiny_run
from examples.arithmetic import model as tiny
from examples.coding import demo
from megatron_rl.shared.records.append_file import read_lines
from megatron_rl.shared.records.audit_check import verify
from tests.e2e import loop
from tests.processes import ROOT

pytestmark = pytest.mark.slow

# A scripted engine writes numbers with spaces between them: one number is code that passes, two numbers cannot run.
TEST = "assert type(f(4, 2, 3)).__name__ == 'int'"


def test_a_run_is_rewarded_by_what_code_computes_in_the_sandbox(tmp_path: Path) -> None:
    tokens = demo.TOKENS
    model = tiny.draw(
        0, vocab_size=len(tokens), eos_token_id=tokens.index(tiny.END), pad_token_id=tokens.index(tiny.PAD)
    )
    tiny.save(model, tmp_path / "model", demo.make_tokenizer())
    prompts = tmp_path / "prompts.jsonl"
    tiny_run.write_rows(prompts, ({"prompt": prompt, "tests": [TEST]} for prompt, _ in demo.list_tasks()))
    words = loop.World(tmp_path, tmp_path / "model", prompts, f"{ROOT}/examples/coding/reward.py:passes").words(
        "run", rollout_num_engines=1, rollout_max_tokens=2, seq_length=32, train_iters=2, grpo_prompts_per_step=4
    )
    loop.run(tmp_path / "ranks", 1, words, OMP_NUM_THREADS="1")
    run = tmp_path / "runs" / "run"
    report = verify(run)
    assert not report.breaches
    assert [item.num_responses for item in report.iterations] == [16, 16]
    responses = [response for line in read_lines(run / "samples.jsonl") for response in line["responses"]]
    assert {response["reward"] for response in responses} == {0.0, 1.0}
    for response in responses:
        assert response["reward"] == (response["finish_reason"] == "stop"), response
