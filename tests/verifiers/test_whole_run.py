"""A whole run: a real environment server of verifiers, real vLLM, and the trainer. `make test-verifiers` runs it."""

import json
from pathlib import Path

import pytest
import tokenizers
import transformers

from examples.arithmetic import model as tiny
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.shared.records.audit_check import verify
from tests.e2e import loop
from tests.e2e.test_acting import read_responses
from tests.verifiers.server import needs_verifiers, serve_guessing

END, PAD = tiny.END, tiny.PAD
# With so few words an untrained model ends its turn after some sixteen of them.
WORDS = (*"12345678", "user", "assistant", "Guess!", "It", "is", "higher.", END, PAD)
TEMPLATE = (
    "{% for m in messages %} {{ m.role }} {{ m.content }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %} assistant {% endif %}"
)
# Of each rollout's agent verifiers makes a process.
NUM_ITERATIONS, NUM_PROMPTS, GROUP_SIZE = 2, 2, 2
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs_verifiers]


def save_model(folder: Path) -> Path:
    """Save an untrained model whose tokens are the words of the game."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=PAD))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([END, PAD])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=END, pad_token=PAD, chat_template=TEMPLATE
    )
    changes = {"eos_token_id": WORDS.index(END), "pad_token_id": WORDS.index(PAD), "max_position_embeddings": 256}
    tiny.save(tiny.draw(0, vocab_size=len(WORDS), **changes), folder, tokenizer)
    return folder


def test_a_real_server_acts_in_rollouts_of_real_vllm_that_are_trained_on(tmp_path: Path) -> None:
    model, run = save_model(tmp_path / "model"), tmp_path / "runs" / "run"
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "Guess!", "secret": secret}) + "\n" for secret in range(1, 9)))
    with serve_guessing() as address:
        words = loop.World(tmp_path, model, rows, "").words(
            "run", reward=None, reward_workers=None, prompt_chat=True, rollout_verifiers=address, rollout_engine="vllm",
            rollout_num_engines=1, rollout_max_num_seqs=16, rollout_env_max_turns=5, rollout_max_tokens=100,
            rollout_agent_timeout=300, rollout_env_timeout=200, rollout_env_concurrency=2, seq_length=128,
            train_iters=NUM_ITERATIONS, grpo_prompts_per_step=NUM_PROMPTS, grpo_group_size=GROUP_SIZE,
            micro_batch_size=GROUP_SIZE,
        )  # fmt: skip
        loop.run(tmp_path / "ranks", 1, words, OMP_NUM_THREADS="1")
    report, records = verify(run), read_metrics(run)
    assert not report.breaches
    assert [iteration.outcome for iteration in report.iterations] == ["complete"] * NUM_ITERATIONS
    assert all(record["responses"]["failed"] == 0 for record in records)
    responses = read_responses(run)
    assert len(responses) == NUM_ITERATIONS * NUM_PROMPTS * GROUP_SIZE
    turns = [sum(span[0] != "environment" for span in response["spans"]) for response in responses]
    assert max(turns) >= 2, turns
    assert {response["engine"] for response in responses} == {"engine-0"}
    # What a limit ends has no reward of the environment.
    components = {"stop": {"found"}, "length": {"found"}, "limit": {"agent"}}
    assert all(response["components"].keys() == components[response["finish_reason"]] for response in responses)
