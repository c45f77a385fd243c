"""A response ends with the chat template's end of a turn, whichever token ends a text."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from megatron_rl.config.settings import DataConfig
from megatron_rl.errors import InputError
from megatron_rl.shared.weights.end_tokens import add_end_tokens, read_end_tokens
from megatron_rl.trainer.data.demonstrations import DemonstrationSource, load_demonstrations
from megatron_rl.trainer.data.prompts import load_prompts
from megatron_rl.trainer.data.tokenizer import PromptTokenizer
from tests import chat_models
from tests.chat_models import CHATML, LLAMA_3, PHI_3, PLAIN, find, write_rows

CHAT = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3 + 4?"},
    {"role": "assistant", "content": "It is 7."},
]


def demonstrate(model: Path, folder: Path, *rows: Any) -> DemonstrationSource:
    config = DataConfig(prompts=[write_rows(folder / "rows.jsonl", *rows)], shuffle=False)
    return load_demonstrations(config, model, seed=0, longest=999, vocab_size=chat_models.VOCAB_SIZE)


@pytest.mark.parametrize(
    ("template", "eos", "end"),
    [
        (CHATML, "<|endoftext|>", "<|im_end|>"),
        (CHATML, "<|im_end|>", "<|im_end|>"),
        (LLAMA_3, "<|end_of_text|>", "<|eot_id|>"),
        (LLAMA_3, "<|eot_id|>", "<|eot_id|>"),
        (PHI_3, "<|endoftext|>", "<|end|>"),
    ],
)
def test_an_answer_is_trained_on_up_to_the_templates_end_of_a_turn_and_not_what_follows(tmp_path, template, eos, end):
    model = chat_models.save_tokenizer(tmp_path / "model", template, eos)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    (one,) = demonstrate(model, tmp_path, {"messages": CHAT}).take(1)
    trained = [response for turns in one.sequences for response in turns[1::2]]
    assert [tokenizer.decode(response) for response in trained] == [f"4{end}", f"It is 7.{end}"]
    # Before each stands the text that a prompt of the same messages would have.
    given = [np.concatenate(turns[:place]) for turns in one.sequences for place in range(1, len(turns), 2)]
    assert [tokenizer.decode(tokens) for tokens in given] == [
        tokenizer.apply_chat_template(CHAT[:count], tokenize=False, add_generation_prompt=True) for count in (1, 3)
    ]


def test_a_text_ends_with_the_end_of_text_whatever_the_template_writes(tmp_path):
    model = chat_models.save_tokenizer(tmp_path / "model", CHATML, "<|endoftext|>")
    (one,) = demonstrate(model, tmp_path, {"prompt": "3 + 4 =", "completion": " 7"}).take(1)
    assert one.sequences[0][1][-1] == find("<|endoftext|>")


def test_a_chat_whose_template_ends_no_turn_is_refused_by_name(tmp_path):
    model = chat_models.save_tokenizer(tmp_path / "model", PLAIN, "<|endoftext|>")
    with pytest.raises(InputError, match=r"rows.jsonl:1 is a chat, and the chat template .* writes no special token"):
        demonstrate(model, tmp_path, {"messages": CHAT})
    # Responses to it are sampled until the end of the text.
    rows = write_rows(tmp_path / "prompts.jsonl", {"prompt": CHAT[:1]})
    source = load_prompts(DataConfig(prompts=[rows]), model, seed=0, longest=999, vocab_size=chat_models.VOCAB_SIZE)
    assert (source.stops, source.notes) == ((), ())


def test_a_chat_whose_template_ends_only_some_turns_is_refused_by_name(tmp_path):
    template = CHATML.replace("<|im_end|>", "{% if m['content'] != '4' %}<|im_end|>{% endif %}")
    model = chat_models.save_tokenizer(tmp_path / "model", template, "<|endoftext|>")
    with pytest.raises(InputError, match=r"rows.jsonl:1 has an answer after which .* not write its end .*<\|im_end\|>"):
        demonstrate(model, tmp_path, {"messages": CHAT})


def test_the_end_of_a_turn_is_found_though_a_template_refuses_or_changes_messages(tmp_path):
    """Try a template that needs a system message, and one that writes thoughts and trims answers."""
    needy = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    thinking = CHATML.replace("{{ m['content'] }}", "<think>\n\n</think>\n\n{{ m['content'] | trim }} ")
    for name, template, config in (
        ("needy", needy, DataConfig(system_message="Be brief.")),
        ("thinking", thinking, DataConfig()),
    ):
        model = chat_models.save_tokenizer(tmp_path / name, template, "<|endoftext|>")
        tokenizer = PromptTokenizer.load(model, chat_models.VOCAB_SIZE, config)
        assert tokenizer.end_of_turn == find("<|im_end|>"), name


@pytest.mark.parametrize(
    ("config", "generation", "stops"),
    [
        ({"eos_token_id": find("<|endoftext|>")}, None, (find("<|im_end|>"),)),
        ({"eos_token_id": find("<|endoftext|>")}, {"eos_token_id": [find("<|endoftext|>")]}, (find("<|im_end|>"),)),
        ({"eos_token_id": [find("<|endoftext|>"), find("<|im_end|>")]}, None, ()),
        ({"eos_token_id": find("<|endoftext|>")}, {"eos_token_id": [find("<|im_end|>")]}, ()),
        ({"text_config": {"eos_token_id": find("<|im_end|>")}}, None, ()),
    ],
)
def test_an_end_of_a_turn_that_the_models_files_do_not_list_is_noted_once_and_asked_for(
    tmp_path, config, generation, stops
):
    model = chat_models.save_tokenizer(tmp_path / "model", CHATML, "<|endoftext|>")
    (model / "config.json").write_text(json.dumps({"model_type": "made_up", **config}))
    if generation is not None:
        (model / "generation_config.json").write_text(json.dumps(generation))
    rows = write_rows(tmp_path / "prompts.jsonl", {"prompt": CHAT[:1]}, {"prompt": CHAT[:3]})
    size = chat_models.VOCAB_SIZE
    prompts = load_prompts(DataConfig(prompts=[rows]), model, seed=0, longest=999, vocab_size=size)
    for source in (prompts, demonstrate(model, tmp_path, {"messages": CHAT})):
        assert source.stops == stops
        if stops:
            (note,) = source.notes
            assert "ends a turn with <|im_end|> (258)" in note
            assert "(<|endoftext|> (256))" in note
        else:
            assert source.notes == ()
    texts = write_rows(tmp_path / "texts.jsonl", {"prompt": "3 + 4 ="})
    assert load_prompts(DataConfig(prompts=[texts]), model, seed=0, longest=999, vocab_size=size).stops == ()


def test_ends_are_added_to_what_a_folder_lists(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5, "bos_token_id": 3, "vocab_size": 9}))
    add_end_tokens(tmp_path, [5])
    assert not (tmp_path / "generation_config.json").exists()
    add_end_tokens(tmp_path, [7])
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"bos_token_id": 3, "eos_token_id": [5, 7]}
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.8, "eos_token_id": 6}))
    add_end_tokens(tmp_path, [7, 6])
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"top_p": 0.8, "eos_token_id": [6, 5, 7]}
    assert read_end_tokens(tmp_path) == [6, 5, 7]
    assert transformers.GenerationConfig.from_pretrained(tmp_path).eos_token_id == [6, 5, 7]
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(InputError, match="generation_config.json is not JSON"):
        read_end_tokens(tmp_path)
