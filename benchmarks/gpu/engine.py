"""Flags of an engine on the GPU, beside a trainer on the same one, and the room that its weights need."""

import os
from pathlib import Path

from benchmarks.gpu.work import Work
from megatron_rl.shared.weights.mapping import Mapping
from megatron_rl.types import Architecture

MAX_MODEL_LEN = 4096
NUM_AT_ONCE = 256
# Keys and values of NUM_AT_ONCE responses of the 0.6 B model, prompts included.
CACHE_BYTES = 16 << 30
# With the cache's size given, vLLM only checks that this share is free.
FREE_SHARE = 0.2
# Sizes of an engine on the CPU.
TINY_LEN, TINY_AT_ONCE = 256, 8


def list_words_of_sidecar(
    work: Work, model: Path, num_at_once: int = NUM_AT_ONCE, cache_bytes: int = CACHE_BYTES, of_vllm: str = ""
) -> list[str]:
    """Return the flags of a sidecar that is started alone, but for its reward; `of_vllm` are further ones of vLLM."""
    length = TINY_LEN if work.is_tiny else MAX_MODEL_LEN
    words = [
        "--platform", work.device, "--seq-length", str(length), "--hf-model", str(model), "--reward-workers", "1",
    ]  # fmt: skip
    if work.is_tiny:
        return [*words, "--rollout-max-num-seqs", str(TINY_AT_ONCE), "--rollout-num-threads", "1"]
    flags = f"--gpu-memory-utilization {FREE_SHARE} --kv-cache-memory-bytes {cache_bytes} {of_vllm}".strip()
    return [
        *words, "--rollout-devices", "0", "--rollout-dtype", work.architecture.dtype,
        "--rollout-max-num-seqs", str(num_at_once), f"--rollout-vllm-args={flags}",
    ]  # fmt: skip


WORDS_OF_RUN = ("--rollout-max-num-seqs", str(NUM_AT_ONCE), "--rollout-colocate")
"""The flags of a run on a GPU with its own engine."""


def count_bytes(architecture: Architecture) -> int:
    """Return the bytes of the model's weights, as they are stored."""
    size = {"float32": 4, "bfloat16": 2}[architecture.dtype]
    return size * sum(spec.num_elements for spec in Mapping(architecture).manifest())


def find_room(folder: Path) -> int:
    """Return the bytes that are free in the folder's file system."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
