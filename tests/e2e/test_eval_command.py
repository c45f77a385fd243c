"""A run whose evaluations run a program, over scripted engines: its figures are metrics, and a failure is counted."""

import math
import shlex
import sys
from pathlib import Path

import pytest

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.shared.records.audit_check import verify
from tests.e2e import loop

pytestmark = [pytest.mark.each_change, pytest.mark.timeout(300)]
PROGRAM = """
import json, os, sys
import openai

version = int(os.environ["EVAL_VERSION"])
if version == 1:
    sys.exit("it fails once")
chat = [{"role": "user", "content": "5 6 7"}]
answer = openai.OpenAI().chat.completions.create(model="policy", messages=chat).choices[0].message.content
with open(os.environ["EVAL_FIGURES"], "w") as file:
    json.dump({"words": len(answer.split()), "math.version": version / 2}, file)
"""


def test_figures_of_a_program_are_metrics_and_a_failure_is_counted_and_never_a_zero(tmp_path: Path) -> None:
    world = loop.make_world(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    command = shlex.join([sys.executable, str(tmp_path / "program.py")])
    run, board = tmp_path / "run", tmp_path / "board"
    words = world.words(
        "run", rollout_folder=run, train_iters=2, prompts_held_out=4, eval_interval=1, eval_command=command,
        tensorboard_dir=board,
    )  # fmt: skip
    ranks = loop.run(tmp_path / "output", 1, words)
    evaluations = {line["version"]: line["evaluation"] for line in read_metrics(run) if "evaluation" in line}
    assert evaluations.keys() == {0, 1, 2}
    assert all(math.isfinite(one["mean"]) and one["num_prompts"] == 4 for one in evaluations.values())
    for version in (0, 2):
        assert evaluations[version]["command"].pop("words") > 0
        assert evaluations[version]["command"] == {"math.version": version / 2}
        assert "command_failed" not in evaluations[version]
    assert evaluations[1]["command_failed"] == 1
    assert "command" not in evaluations[1]
    warning = "warning: version 1 has no figures of --eval-command: it ended with exit code 1; its output is in "
    assert f"{warning}{run / 'logs' / 'eval-command.log'}" in ranks.text()
    # The program's calls are neither trained on nor in the audit log.
    assert not verify(run).breaches
