"""A base model whose end of text is not the chat template's end of a turn: demonstrations, and on into GRPO."""

import json

import pytest
import torch
import transformers

from megatron_rl.shared.weights.end_tokens import read_end_tokens
from tests import chat_models
from tests.e2e import loop

pytestmark = [pytest.mark.each_change, pytest.mark.timeout(600)]

TEXT, TURN = chat_models.find("<|endoftext|>"), chat_models.find("<|im_end|>")
NOTE = "the chat template ends a turn with <|im_end|>"


def read_sampling(run) -> list[list[int]]:
    """Return the stop tokens of each submission and evaluation."""
    events = loop.read_events(run)
    return [event["sampling"]["stop_token_ids"] for event in events if event["event"] in ("submit", "evaluation")]


def compute_probability(model, row) -> float:
    """Compute the probability of the end of the turn after the row's answer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
    tokens = tokenizer(text + row["completion"], return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        return policy(**tokens).logits[0, -1].softmax(-1)[TURN].item()


def test_demonstrations_teach_the_end_of_a_turn_and_grpo_stops_there(tmp_path):
    model = loop.draw_model(tmp_path / "model", vocab_size=chat_models.VOCAB_SIZE, eos_token_id=TEXT)
    chat_models.save_tokenizer(model, chat_models.CHATML, "<|endoftext|>")
    rows = [
        {"prompt": [{"role": "user", "content": f"{number % 7} + {number % 5}?"}], "completion": "It is a number."}
        for number in range(24)
    ]
    prompts = tmp_path / "rows.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    world = loop.World(tmp_path, model, prompts, loop.write_reward(tmp_path / "reward.py"))
    flags = {
        "hf_model": model, "prompts": prompts, "seq_length": 128, "train_iters": 12, "global_batch_size": 8,
        "micro_batch_size": 4, "lr": 1e-2, "lr_decay_style": "constant", "save": tmp_path / "save",
        "save_hf": tmp_path / "hf", "rollout_folder": tmp_path / "sft",
    }  # fmt: skip
    text = loop.run(tmp_path / "sft", 1, ["--stage", "sft", *loop.to_words(flags)]).text()
    assert text.count(NOTE) == 1
    taught = tmp_path / "hf" / "iter_0000012"
    before, after = (compute_probability(folder, rows[0]) for folder in (model, taught))
    print(f"probability of the end of a turn after an answer: {before:.4f} before, {after:.4f} after 12 updates")
    assert before < 0.05
    assert after > 0.5
    # Other software stops there too.
    assert read_end_tokens(model) == [TEXT]
    assert transformers.GenerationConfig.from_pretrained(taught).eos_token_id == [TEXT, TURN]

    words = ["--load", tmp_path / "save", "--hf-model", model, "--save-hf", tmp_path / "converted"]
    loop.call_cli(tmp_path / "convert", "convert", *words)
    assert read_end_tokens(tmp_path / "converted") == [TEXT, TURN]

    for name, start in (
        ("checkpoint", {"hf_model": model, "load": tmp_path / "save", "finetune": True}),
        ("weights", {"hf_model": taught}),
    ):
        run = tmp_path / name
        changes = {
            "train_iters": 1, "rollout_folder": run / "run", "seq_length": 128, "prompts_held_out": 4,
            "eval_interval": 1, "save_hf": run / "hf", **start,
        }  # fmt: skip
        text = loop.run(run, 1, world.words(name, **changes)).text()
        # The folder that was written lists the token, so engines know it.
        expected, count = ([TURN], 1) if name == "checkpoint" else ([], 0)
        assert text.count(NOTE) == count
        assert read_sampling(run / "run") == [expected] * 3
        assert read_end_tokens(run / "hf" / "iter_0000001") == [TEXT, TURN]
