"""Count the sampled tokens whose log-probs differ between engine and trainer, with and without --batch-invariant.

A real vLLM on a CPU samples groups of 8 to prompts of four lengths. It has 1 to 64 responses at a time. The trainer
computes the log-probs of the same tokens in packs of whole groups, whose responses share their prompt.

python -m benchmarks.batch_invariant
"""

import argparse
import asyncio
import dataclasses
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import random_models
from megatron_rl import platforms
from megatron_rl.command_line import parse as command_line
from megatron_rl.shared.protocol.wire import Response, Sampling, decode_log_probs, decode_tokens
from megatron_rl.sidecar.engines import GroupRequest
from megatron_rl.sidecar.launcher import LocalLauncher
from megatron_rl.sidecar.temporary import make_socket_folder
from megatron_rl.sidecar.vllm.engine import VllmEngine
from megatron_rl.sidecar.vllm.factory import VllmFactory
from megatron_rl.sidecar.vllm.server import ServerConfig
from megatron_rl.types import Architecture

ARCHITECTURE = Architecture(
    family="qwen3", num_layers=2, hidden_size=128, ffn_hidden_size=384, num_attention_heads=4, num_query_groups=2,
    kv_channels=32, vocab_size=512, max_position_embeddings=1024, qk_layernorm=True,
)  # fmt: skip
PROMPT_LENGTHS = (5, 40, 150, 300)
BATCH_SIZES = {1: 0.04, 8: 0.16, 32: 0.4, 64: 0.4}
"""Responses that the engine has at a time, each with its share of the tokens."""
GROUP_SIZE = 8
MAX_LENGTH = 512
TEMPERATURE = 0.8
SAMPLING = Sampling(max_tokens=160, temperature=TEMPERATURE)


@dataclasses.dataclass(frozen=True)
class Group:
    """A prompt, its responses, and the log-probs that the engine sampled them with."""

    prompt: Sequence[int]
    responses: Sequence[Sequence[int]]
    log_probs: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Difference:
    """The tokens that differ, and the cost."""

    num_tokens: int
    num_differing: int
    mean: float
    largest: float
    tokens_a_second: float
    """Tokens a second that the engine samples with the most responses at a time."""
    pack_seconds: float
    """Seconds of a pack of two groups, forward and backward."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens to sample, at least")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--tiny", action="store_true", help="few tokens, for tests")
    arguments = parser.parse_args()
    platforms.select("cpu").install()
    num_tokens = 500 if arguments.tiny else arguments.tokens
    before, after = (measure(num_tokens, arguments.dtype, is_invariant) for is_invariant in (False, True))
    print(f"{'':8}{'tokens':>9}{'differ':>9}{'mean':>10}{'largest':>10}{'tokens/s':>10}{'pack, s':>9}")
    for way, one in (("before", before), ("after", after)):
        print(
            f"{way:8}{one.num_tokens:>9}{one.num_differing:>9}{one.mean:>10.2g}{one.largest:>10.2g}"
            f"{one.tokens_a_second:>10.0f}{one.pack_seconds:>9.3f}"
        )
    figures = {
        "share_before": before.num_differing / before.num_tokens,
        "differing_after": after.num_differing,
        "tokens_after": after.num_tokens,
        "sampling_vs_before": after.tokens_a_second / before.tokens_a_second,
        "pack_vs_before": after.pack_seconds / before.pack_seconds,
    }
    print(json.dumps(figures))


def measure(num_tokens: int, dtype: str, is_invariant: bool) -> Difference:
    """Sample by an engine, and compute the same tokens' log-probs as the trainer does."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        random_models.make(model, dataclasses.replace(ARCHITECTURE, dtype=dtype))
        groups, tokens_a_second = asyncio.run(_sample(model, num_tokens, dtype, is_invariant))
        differences, step_seconds = _compare(model, groups, dtype, is_invariant)
    return Difference(
        len(differences),
        int((differences != 0).sum()),
        float(differences.mean()),
        float(differences.max()),
        tokens_a_second,
        step_seconds,
    )


async def _sample(model: Path, num_tokens: int, dtype: str, is_invariant: bool) -> tuple[list[Group], float]:
    """Sample groups until there are enough of each batch size; return the tokens a second of the largest one too."""
    folder = make_socket_folder()
    config = ServerConfig(
        model=str(model),
        max_model_len=MAX_LENGTH,
        max_num_seqs=max(BATCH_SIZES),
        dtype=dtype,
        is_batch_invariant=is_invariant,
        # Prompts of some hundreds of tokens are read in parts.
        flags=("--max-num-batched-tokens", "128"),
    )
    engine = VllmFactory(config, folder, LocalLauncher()).create("engine")
    draw = np.random.default_rng(0)
    groups: list[Group] = []
    tokens_a_second = 0.0
    try:
        await engine.start()
        for batch_size, share in BATCH_SIZES.items():
            start, num_sampled = time.perf_counter(), 0
            while num_sampled < num_tokens * share:
                sampled = await _sample_round(engine, batch_size, len(groups), draw)
                num_sampled += sum(len(group.log_probs) for group in sampled)
                groups += sampled
            tokens_a_second = num_sampled / (time.perf_counter() - start)
    finally:
        await engine.close()
        shutil.rmtree(folder, ignore_errors=True)
    return groups, tokens_a_second


async def _sample_round(engine: VllmEngine, batch_size: int, number: int, draw: np.random.Generator) -> list[Group]:
    """Sample the groups that have this number of responses together; one response at a time is a group in parts."""
    num_groups, num_parts = max(1, batch_size // GROUP_SIZE), GROUP_SIZE if batch_size == 1 else 1
    lengths = [PROMPT_LENGTHS[(number + index) % len(PROMPT_LENGTHS)] for index in range(num_groups)]
    prompts = [tuple(draw.integers(0, ARCHITECTURE.vocab_size, length).tolist()) for length in lengths]
    answers: list[list[Response]] = [[] for _ in prompts]
    for _ in range(num_parts):
        requests = [
            GroupRequest(f"group-{index}", prompt, GROUP_SIZE // num_parts, int(draw.integers(1 << 40)), SAMPLING)
            for index, prompt in enumerate(prompts)
        ]
        for answer, responses in zip(answers, await asyncio.gather(*map(engine.answer, requests)), strict=True):
            answer += responses
    return [
        Group(
            prompt,
            [decode_tokens(one.tokens).tolist() for one in answer],
            [value for one in answer for value in decode_log_probs(one.log_probs).tolist()],
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def _compare(model: Path, groups: Sequence[Group], dtype: str, is_invariant: bool) -> tuple[np.ndarray, float]:
    """Return the differences of all tokens, and the median seconds of a pack, forward and backward."""
    from megatron_rl.trainer.data.packing import pack_groups
    from megatron_rl.trainer.mcore.session import start_session
    from megatron_rl.trainer.mcore.step.policy import build_policy

    words = (
        f"--platform cpu --train-iters 1 --lr 1e-5 --lr-decay-style constant --grpo-prompts-per-step 8 "
        f"--grpo-group-size {GROUP_SIZE} --micro-batch-size {GROUP_SIZE} --seq-length 512 --rollout-max-tokens 160 "
        f"--hf-model {model} --rollout-temperature {TEMPERATURE}"
    ).split()
    if dtype == "bfloat16":
        words.append("--bf16")
    if is_invariant:
        words.append("--batch-invariant")
    settings = command_line.parse(words)
    differences, seconds = [], []
    with start_session(settings) as session:
        policy = build_policy(settings, session, 1)
        (chunk,) = policy.chunks
        for start in range(0, len(groups), 2):
            chosen = groups[start : start + 2]
            pack = pack_groups([(one.prompt, one.responses) for one in chosen])
            begin = time.perf_counter()
            log_probs_N = chunk(pack, TEMPERATURE)
            log_probs_N.sum().backward()
            seconds.append(time.perf_counter() - begin)
            engines = np.concatenate([one.log_probs for one in chosen])
            differences.append(np.abs(log_probs_N.detach().double().numpy() - engines))
    return np.concatenate(differences), float(np.median(seconds))


if __name__ == "__main__":
    main()
