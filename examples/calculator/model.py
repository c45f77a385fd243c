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


def draw(seed: int, tokens: tuple[str, ...] = TOKENS) -> transformers.PreTrainedModel:
    """Draw a model with fresh weights."""
    vocab_size = -(-len(tokens) // 16) * 16
    return tiny.draw(seed, vocab_size=vocab_size, eos_token_id=tokens.index(END), pad_token_id=tokens.index(PAD))


def make_tokenizer(
    tokens: tuple[str, ...] = TOKENS, pieces: tuple[str, ...] = (*CALL, *CALL_END)
) -> transformers.PreTrainedTokenizerFast:
    """Make a tokenizer of characters, and of longer pieces, such as those of calls."""
    words = tokenizers.models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token=UNKNOWN)
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in pieces])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, unk_token=UNKNOWN, chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
