"""An untrained Qwen3 for the cookbook's recipes: bytes, and the special tokens of Qwen's chats."""

from pathlib import Path

import torch
import transformers

from examples.tiny_model import make_tokenizer

NAME = "Qwen/Qwen3-8B"
"""A name that the cookbook knows. It looks for the tokenizer in a folder of this name first."""
END = "<|im_end|>"


def save(folder: Path, seed: int = 0) -> None:
    tokenizer = make_words()
    make(tokenizer, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_words() -> transformers.PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    words = ["<|im_start|>", END, "<|endoftext|>", "<think>", "</think>"]
    tokenizer.add_special_tokens({"additional_special_tokens": words})
    tokenizer.eos_token = END
    return tokenizer


def make(tokenizer: transformers.PreTrainedTokenizerFast, seed: int = 0) -> transformers.Qwen3ForCausalLM:
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=False,
        eos_token_id=tokenizer.convert_tokens_to_ids(END), pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    return transformers.Qwen3ForCausalLM(config)
