"""Draw an untrained Qwen3 of 150,000 parameters that reads any text or chat byte by byte, where no model is at hand.

python -m examples.tiny_model FOLDER
"""

import argparse
from pathlib import Path

import tokenizers
import torch
import transformers

END = "<end>"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for --hf-model")
    save(parser.parse_args().folder)


def save(folder: Path, seed: int = 0) -> None:
    tokenizer = make_tokenizer()
    # vLLM wants heads of at least 32 on a CPU; two tensor-parallel ranks and two stages want two of everything.
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Make a tokenizer in which each byte of a text is a token."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = {letter: index for index, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    main()
