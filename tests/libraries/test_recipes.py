"""Recipes with other projects' tasks and agents. `make test-recipes` runs it, and with vLLM all its tests."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from examples import tiny_run
from examples.calculator.model import make_tokenizer
from megatron_rl.cli import main
from megatron_rl.shared.records.audit_check import verify
from tests.processes import ROOT

demo = pytest.importorskip("examples.gym.demo", reason="reasoning-gym has its own environment: make test-recipes")
reward = pytest.importorskip("examples.gym.reward", reason="reasoning-gym has its own environment: make test-recipes")
FRAMEWORKS = os.environ.get("FRAMEWORKS_VENV")
AGENTS = {"openai-agents": "by_openai_agents.py", "langgraph": "by_langgraph.py"}
if FRAMEWORKS is None:
    pytest.skip("needs frameworks of agents: make test-recipes", allow_module_level=True)


def test_answers_of_the_mixture_get_the_whole_reward_and_the_tokenizer_knows_every_question() -> None:
    tasks = [demo.draw_entries(task, seed=0) for task in demo.TASKS]
    tokenizer = make_tokenizer(*demo.list_tokens(tasks))
    for entries in tasks:
        answers = [entry["answer"] for entry in entries]
        assert set(score(answers, entries)) == {1.0}
        assert max(score([f"{answer}?" for answer in answers], entries)) < 1
        tokens = [tokenizer.encode(entry["question"] + entry["answer"]) for entry in entries]
        assert max(map(len, tokens)) < 30
        assert not any(tokenizer.unk_token_id in row for row in tokens)


def score(answers: list[str], entries: list[dict[str, Any]]) -> list[float]:
    return reward.score([[{"role": "assistant", "content": answer}] for answer in answers], entries)


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_of_the_example_calls_its_tool_and_is_rewarded_for_the_right_answer(name, tmp_path, capfd) -> None:
    agent = f"{ROOT}/examples/calculator/{AGENTS[name]}:act"
    prompts = tmp_path / "prompts.jsonl"
    tiny_run.write_rows(prompts, [{"prompt": "347*285", "answer": "098895"}])
    words = ["try-agent", agent, "--rollout-agent-python", f"{FRAMEWORKS}/bin/python", "--prompts", str(prompts)]
    for answer, reward in (("098895", 1), ("098896", 0)):
        assert main([*words, "--prompt-chat", "--answer", answer]) == 0
        printed = capfd.readouterr().out
        assert "policy: calls calculate with" in printed
        assert f"2 calls, 0 of them branches\nreward {reward} " in printed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gym", *AGENTS])
def test_a_recipe_is_learned(name, tmp_path) -> None:
    """Run the command of make NAME, in another folder."""
    environments = [f"VENV={sys.prefix}", f"GYM_VENV={sys.prefix}", f"FRAMEWORKS_VENV={FRAMEWORKS}"]
    planned = subprocess.run(
        ["make", "-n", "--no-print-directory", name, *environments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    command, out = planned.stdout.splitlines()[-1], tmp_path / name
    assert f" --out {name}" in command
    subprocess.run(command.replace(f" --out {name}", f" --out {out}"), shell=True, cwd=ROOT, timeout=3000, check=True)
    result = json.loads((out / "result.json").read_text())
    assert result["before"] < 0.4
    assert result["after"] > 0.85
    assert not verify(out / "run").breaches
