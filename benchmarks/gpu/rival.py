"""Time whole iterations beside those of TRL's GRPOTrainer, on the same GPU, in turns.

Both have the same model, prompts, reward and number of responses, and every response has all of its tokens. TRL runs in
an environment of its own (`make rival`), since its newest release supports an older vLLM. Both processes stay on the
GPU, and only one of them has an iteration at a time. The engines have the same memory for keys and values, and the
trainers about the same number of tokens in a micro-batch: TRL repeats the prompt of each response.
"""

import dataclasses
import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu import engine, parts, schedules, start
from benchmarks.gpu.players import Opponent
from benchmarks.gpu.rival_trl import Settings
from benchmarks.gpu.work import Work


@dataclasses.dataclass(frozen=True)
class Load:
    """The model and the groups of an iteration."""

    size: str
    gib: float
    """GiB of memory that the GPU must have for both."""
    seconds: float
    """Seconds that both starts and two iterations of each may take."""
    prompt: int = 512
    """Tokens of a prompt."""
    response: int = 256
    """Tokens of a response."""
    num_prompts: int = 32
    group_size: int = 8
    groups_at_once: int = 2
    """The groups of a micro-batch of ours."""
    their_batch: int = 8
    """The responses of a micro-batch of TRL."""
    num_rounds: int = 4

    @property
    def num_tokens(self) -> int:
        """The number of response tokens of an iteration."""
        return self.num_prompts * self.group_size * self.response

    def __str__(self) -> str:
        return f"{self.size}, {self.num_prompts} x {self.group_size}, {self.prompt}/{self.response}"


LOADS = (Load("0.6b", 75, 110), Load("1.7b", 130, 150))
TINY = Load("tiny", 0, 0, 12, 4, 2, 2, groups_at_once=1, their_batch=2, num_rounds=1)
# Keys and values of all responses of an iteration, and of each prompt once.
CACHE_BYTES = 12 << 30
# What vLLM needs beside weights and cache, to divide what TRL gives it as a share of the GPU.
OTHER_BYTES = 3 << 30


def measure(work: Work) -> None:
    """Add a row for each size that the GPU has memory and time for."""
    for load in (TINY,) if work.is_tiny else LOADS:
        of_load = work if work.is_tiny else dataclasses.replace(work, size=load.size)
        total = 0.0 if work.is_tiny else torch.cuda.mem_get_info()[1] / 2**30
        if total < load.gib:
            reason = f"it needs a GPU with {load.gib:.0f} GiB of memory, and this one has {total:.0f}"
            work.leave_out("rival", str(load), reason)
        elif work.has_time("rival", str(load), load.seconds):
            with tempfile.TemporaryDirectory() as temporary:
                _measure(of_load, load, Path(temporary))


def _measure(work: Work, load: Load, folder: Path) -> None:
    """Add the row of a load."""
    model, prompts, reward = work.make_model(), folder / "prompts.jsonl", folder / "reward.py"
    reward.write_text(schedules.REWARD)
    count = 1 + load.num_rounds
    schedules.write_prompts(prompts, load.prompt, load.num_prompts * count, work.architecture.vocab_size)
    python = parts.find_rival(work.is_tiny)
    if python is None:
        raise RuntimeError(parts.NO_RIVAL)
    settings = make_settings(work, load, model, prompts, f"{reward}:parity", folder / "trl")
    begun = find_held(work)
    words = make_words(work, load, model, prompts, f"{reward}:parity", folder)
    with Opponent(
        lambda pipes: [sys.executable, "-m", "benchmarks.gpu.rival_ours", pipes, *words], folder / "ours.output"
    ) as ours:
        ours.play(work.seconds_left)
        held = find_held(work)
        # TRL starts after ours: an engine that starts must find the memory as it leaves it.
        with Opponent(
            lambda pipes: [
                str(python), "-m", "benchmarks.gpu.rival_trl", pipes, json.dumps(dataclasses.asdict(settings)),
            ],
            folder / "trl.output",
        ) as theirs:  # fmt: skip
            theirs.play(work.seconds_left)
            their_held = find_held(work) - held
            rounds = take_turns(work, load, ours, theirs)
    our_seconds, their_seconds = (statistics.median(seconds) for seconds in zip(*rounds, strict=True))
    work.add(
        "rival", str(load),
        ours=our_seconds, theirs=their_seconds,
        tokens=load.num_tokens / our_seconds, their_tokens=load.num_tokens / their_seconds,
        gib=(held - begun) / 2**30, their_gib=their_held / 2**30,
        vs_trl=statistics.median(theirs / ours for ours, theirs in rounds),
    )  # fmt: skip


def take_turns(work: Work, load: Load, ours: Opponent, theirs: Opponent) -> list[tuple[float, float]]:
    """Return the seconds of both, round by round, as long as there is time for a further round."""
    rounds: list[tuple[float, float]] = []
    while len(rounds) < load.num_rounds:
        if rounds and work.seconds_left < 1.5 * max(map(sum, rounds)):
            break
        rounds.append((ours.play(work.seconds_left), theirs.play(work.seconds_left)))
    return rounds


def find_held(work: Work) -> int:
    """Return the bytes of the GPU that all processes hold; 0 on the CPU."""
    if work.is_tiny:
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def make_words(work: Work, load: Load, model: Path, prompts: Path, reward: str, folder: Path) -> list[str]:
    """Return the flags of our run, with its own engine on the same GPU."""
    words = [
        "--platform", work.device, *(["--bf16"] if work.architecture.dtype == "bfloat16" else []),
        "--hf-model", str(model), "--prompts", str(prompts), "--reward", reward, "--reward-workers", "1",
        "--rollout-folder", str(folder / "ours"), "--seq-length", str(load.prompt + load.response),
        "--rollout-max-tokens", str(load.response), "--rollout-ignore-eos",
        "--train-iters", str(1 + load.num_rounds), "--grpo-prompts-per-step", str(load.num_prompts),
        "--grpo-group-size", str(load.group_size),
        "--micro-batch-size", str(load.groups_at_once * load.group_size), "--lr", "1e-6",
        "--lr-decay-style", "constant", "--progress", "lines", "--log-samples", "0", "--rollout-mismatch-warning", "1",
    ]  # fmt: skip
    if work.is_tiny:
        script = folder / "script.json"
        script.write_text(json.dumps({"lengths": [load.response, load.response]}))
        return [*words, *start.SCRIPTED, str(script)]
    flags = f"--gpu-memory-utilization {engine.FREE_SHARE} --kv-cache-memory-bytes {CACHE_BYTES}"
    return [*words, *engine.WORDS_OF_RUN, f"--rollout-vllm-args={flags}"]


def make_settings(work: Work, load: Load, model: Path, prompts: Path, reward: str, folder: Path) -> Settings:
    """Return the settings of TRL's run."""
    share = 0.0
    if not work.is_tiny:
        needed = CACHE_BYTES + OTHER_BYTES + engine.count_bytes(work.architecture)
        share = needed / torch.cuda.mem_get_info()[1]
    return Settings(
        model=str(model), prompts=str(prompts), reward=reward, folder=str(folder), num_prompts=load.num_prompts,
        group_size=load.group_size, prompt_length=load.prompt, num_tokens=load.response,
        num_iterations=1 + load.num_rounds, batch_size=load.their_batch, dtype=work.architecture.dtype,
        is_on_gpu=not work.is_tiny, memory_share=share,
    )  # fmt: skip
