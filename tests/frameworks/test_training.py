"""Runs with each of the frameworks' agents as it is, on a real vLLM: what they take part in has no breach.

`make test-frameworks` runs it.
"""

import json
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from examples.arithmetic import model as tiny
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.shared.records.audit_check import verify
from tests import chat_models
from tests.e2e import loop
from tests.frameworks.test_frameworks import AGENTS, FIELDS, OUTCOMES, PROGRAMS, PYTHON, find_python
from tests.processes import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="needs the frameworks: make test-frameworks"),
]
ITERATIONS, PROMPTS, GROUP = 2, 2, 4
# The programs' instructions and tools are long.
LENGTHS = {"codex": 32768, "claude_code": 98304}
VOCAB_SIZE = 4096


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


# What the policy says in a turn, each of them as often; an answer ends most conversations.
ADDS, MULTIPLIES = call("add", first=20, second=22), call("multiply", first=3, second=42)
TURNS = {
    "pydantic_ai": [ADDS, MULTIPLIES, call("final_result", value=126)],
    "smolagents": [ADDS, MULTIPLIES, call("final_answer", answer="126")],
    "instructor": [call("Sum", first=20, second=22), call("Sum", first=20, second=23)],
    "dspy_predict": [FIELDS, FIELDS.replace("126", "127")],
    "mini_swe_agent": [call("bash", command="true"), call("bash", command="false")],
    "codex": ["126", "It is 126."],
    "claude_code": ["126", "It is 126."],
}
USUAL = [ADDS, MULTIPLIES, "126"]


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    """Train a tokenizer, whose tokens are pieces of words."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 8,
        special_tokens=list(chat_models.SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([path.read_text() for path in (ROOT / "docs").glob("*.md")], trainer)
    return tokenizer


def make_policy(folder: Path, tokenizer: tokenizers.Tokenizer, turns: list[str], length: int) -> None:
    """Save a model that says one of the turns, each a token, wherever it is asked to, and ends."""
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=chat_models.HERMES
    )
    fast.add_tokens([tokenizers.AddedToken(turn, normalized=False) for turn in turns])
    ends = {"eos_token_id": fast.eos_token_id, "pad_token_id": fast.pad_token_id}
    model = tiny.draw(0, vocab_size=VOCAB_SIZE, max_position_embeddings=length, **ends)
    numbers = fast.convert_tokens_to_ids(turns)
    begin = fast.apply_chat_template([{"role": "user", "content": ""}], add_generation_prompt=True)["input_ids"][-1]
    with torch.no_grad():
        # Layers as drawn change an embedding little, so that a logit is a product of two tokens.
        embeddings = model.get_input_embeddings().weight.mul_(50)
        head = model.get_output_embeddings().weight.zero_()
        head[numbers] = embeddings[begin] / 8
        head[fast.eos_token_id] = embeddings[numbers].sum(dim=0) / 8
    tiny.save(model, folder, fast)


@pytest.mark.parametrize("name", [*OUTCOMES, *PROGRAMS])
def test_a_run_with_the_agent_of_a_framework_has_no_breach(name: str, tokenizer, tmp_path: Path) -> None:
    length = LENGTHS.get(name, 4096)
    make_policy(tmp_path / "model", tokenizer, TURNS.get(name, USUAL), length)
    world = loop.World(
        tmp_path,
        tmp_path / "model",
        loop.write_prompts(tmp_path / "prompts.jsonl", 8),
        loop.write_reward(tmp_path / "reward.py"),
    )
    words = world.words(
        name,
        rollout_engine="vllm",
        rollout_num_engines=1,
        rollout_max_tokens=length - 64,
        seq_length=length,
        max_prompt_tokens=64,
        train_iters=ITERATIONS,
        grpo_prompts_per_step=PROMPTS,
        grpo_group_size=GROUP,
        rollout_agent=f"{AGENTS}:{name}",
        rollout_agent_python=find_python(name),
        rollout_env_concurrency=4,
        rollout_env_max_turns=8,
        rollout_agent_timeout=300,
        rollout_gateway_advise=True,
        rollout_tool_parser="hermes",
        prompt_chat=True,
        reward_confine="off" if name == "claude_code" else None,
    )
    loop.run(world.folder / "outputs" / name, 1, words)
    run = world.folder / "runs" / name
    report = verify(run)
    assert not report.breaches
    assert [item.outcome for item in report.iterations] == ["complete"] * ITERATIONS
    rows = [row for row in read_metrics(run) if "loss" in row]
    assert any(row["gradient_norm"] > 0 for row in rows)
