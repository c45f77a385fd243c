"""Models of any size, with random weights, for benchmarks."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rl.shared.weights import files
from megatron_rl.shared.weights.families import derive_config
from megatron_rl.shared.weights.fingerprint import DTYPES
from megatron_rl.shared.weights.mapping import Mapping
from megatron_rl.types import Architecture


def make(folder: Path, architecture: Architecture, device: str = "cpu") -> int:
    """Write a Hugging Face folder, tokenizer included, and return the bytes of its weights, drawn on the device."""
    plan = files.FilePlan(Mapping(architecture).manifest())
    files.create(folder, plan)
    with files.Writer(folder, plan) as writer:
        for spec in plan.specs.values():
            values = torch.empty(spec.shape, device=device).normal_(std=0.02).to(DTYPES[spec.dtype])
            writer.put(spec.name, 0, 0, values.cpu())
    (folder / "config.json").write_text(json.dumps(derive_config(architecture)))
    if index := plan.index():
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    make_tokenizer(folder, architecture.vocab_size)
    return plan.num_bytes


def make_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer that has a word for each token; spaces separate words."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
