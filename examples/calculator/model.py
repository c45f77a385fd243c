"""The untrained model, and its tokenizer with a chat template that writes tools, calls and results.

A question, a call and its result are `<tools>calculate<user>347*285<end><assistant>`, then
`<tool_call>{"name": "calculate", "arguments": {"expression": "347*285"}}</tool_call><end>`, which is how Hermes, Qwen
and others write calls, and `<tool>098895<end><assistant>`.
"""

from pathlib import Path

import tokenizers
import transformers

from examples.arithmetic import model as tiny

END, PAD, UNKNOWN = tiny.END, tiny.PAD, "<unknown>"
CALL = ("<tool_call>", '{"name": "', "calculate", '", "arguments": {"expression": "')
CALL_END = ('"}}', "</tool_call>")
SPECIAL = (END, PAD, UNKNOWN, "<tools>", "<user>", "<assistant>", "<tool>")
TOKENS = (*"0123456789+-*", *CALL, *CALL_END, *SPECIAL)
TEMPLATE = (Path(__file__).parent / "template.jinja").read_text().replace("\n", "")
_VOCAB_SIZE = 32


def draw(seed: int) -> transformers.PreTrainedModel:
    """Draw a model with fresh weights."""
    return tiny.draw(seed, vocab_size=_VOCAB_SIZE, eos_token_id=TOKENS.index(END), pad_token_id=TOKENS.index(PAD))


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Make a tokenizer of characters, and of the longer pieces of calls."""
    words = tokenizers.models.WordLevel({token: number for number, token in enumerate(TOKENS)}, unk_token=UNKNOWN)
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in (*CALL, *CALL_END)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, unk_token=UNKNOWN, chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
