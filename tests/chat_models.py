"""Tokenizers of bytes for tests, with the chat templates and special tokens of released models; and one of words."""

import json
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# The template writes the text's end token after the last turn, after the end of that turn.
PHI_3 = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
# The model takes text alone.
PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# Calls and results in tags, as Qwen's templates write them: a call stands between tags, and results are the user's.
HERMES = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>"
    "<|im_end|>\n{% endif %}{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{% if messages[loop.index0 - 1]['role'] != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m['content'] }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% for c in m.get('tool_calls') or [] %}"
    "{% if not loop.first or m['content'] %}\n{% endif %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A single call in a turn, as Llama's templates write it: another token ends the turn, and results are quoted.
ONE_CALL = (
    "{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n{{ tools | tojson }}<|eot_id|>{% endif %}"
    "{% for m in messages %}{% if m.get('tool_calls') %}{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "<|end|>{% else %}<|start_header_id|>{{ 'ipython' if m['role'] == 'tool' else m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | tojson if m['role'] == 'tool' else m['content'] }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# A template that reads arguments as text, as DeepSeek's do.
TEXT_ARGUMENTS = (
    "{% for m in messages %}{% if m.get('tool_calls') %}<|assistant|>{% for c in m.tool_calls %}"
    "{{ '<call>' + c.function.name + ' ' + c.function.arguments + '</call>' }}{% endfor %}<|end|>"
    "{% else %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|end|>", "<|user|>", "<|assistant|>",
)  # fmt: skip
NUM_BYTES = 256
VOCAB_SIZE = NUM_BYTES + len(SPECIAL)


def find(special: str) -> int:
    """Return the number of a special token."""
    return NUM_BYTES + SPECIAL.index(special)


def save_tokenizer(folder: Path, template: str, eos: str) -> Path:
    """Save a tokenizer whose tokens are bytes, and the special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token="<|endoftext|>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


WORDS = ("<s>", "<|user|>", "<|system|>", "<|assistant|>", "<|end|>", "#", "?")
NUM_WORDS = len(WORDS) + 100
BOS, USER, SYSTEM, ASSISTANT, END, BEHIND, UNKNOWN = range(len(WORDS))


def n(*numbers: int) -> list[int]:
    """Return the tokens of the words with these numbers."""
    return [len(WORDS) + number for number in numbers]


def save_words(folder: Path, template: str) -> Path:
    """Save a tokenizer that knows the words n0 to n99; it puts <s> before text, and ends it with <|end|>."""
    words = (*WORDS, *(f"n{number}" for number in range(100)))
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|end|>", unk_token="?",
        additional_special_tokens=list(WORDS[1:4]),
    )  # fmt: skip
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def write_rows(path: Path, *rows: Any) -> Path:
    """Write JSONL; a row of bytes is written as it is."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path
