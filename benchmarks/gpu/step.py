"""Time a training step, from slots to update, in turns with the same step by transformers.

transformers has sdpa, bf16, fused AdamW, gradients that are clipped, and logits of responses alone. It computes whole
sequences, each with its own prompt. Its micro-batch is the fastest of those that were tried.

Every micro-batch is the same slot. A slot has the groups of one micro-batch, and the step as many slots as the plan:
the responses that a step trained on are counted, and compared with those of the work.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks import shared_prompt_step
from benchmarks.gpu import turns
from benchmarks.gpu.work import Work
from benchmarks.step import Work as Operations
from megatron_rl import platforms
from megatron_rl.platforms import Platform
from megatron_rl.types import Architecture


@dataclasses.dataclass(frozen=True)
class Shape:
    """The groups of a step."""

    prompt: int
    response: int
    num_responses: int
    num_groups: int
    groups_at_once: int = 1
    """The groups of a micro-batch."""

    def __post_init__(self) -> None:
        assert self.num_groups % self.groups_at_once == 0, self

    @property
    def num_tokens(self) -> int:
        """The number of response tokens of a step."""
        return self.num_groups * self.num_responses * self.response

    def __str__(self) -> str:
        return f"{self.prompt}/{self.response}/{self.num_responses} x {self.num_groups}, {self.groups_at_once}"


SHAPES = {
    "0.6b": (
        Shape(512, 1024, 8, 4, groups_at_once=4),
        Shape(4096, 1024, 16, 2, groups_at_once=2),
        Shape(16, 512, 8, 8),
        Shape(512, 1024, 8, 4),
    ),
    "1.7b": (Shape(1024, 1024, 8, 2),),
    "4b": (Shape(2048, 1024, 8, 1),),
}
TINY = Shape(16, 8, 2, 4, groups_at_once=2)
FLAGS = (
    "--train-iters 1000 --lr 1e-6 --lr-decay-style constant --grpo-prompts-per-step {groups} --grpo-group-size {k} "
    "--micro-batch-size {sequences} --seq-length {length} --rollout-max-tokens {r}"
)
NUM_ROUNDS = 2
SECONDS_OF_A_SHAPE = 12.0
# Sequences of a micro-batch of transformers.
SEQUENCES_TRIED = (16, 8, 4)


def measure(work: Work) -> None:
    """Add a row for each shape of the work's model."""
    platform = platforms.select(work.device)
    platform.install()
    model = work.make_model()
    for number, shape in enumerate((TINY,) if work.is_tiny else SHAPES[work.size]):
        name = f"{'tiny' if work.is_tiny else work.size}, {shape}"
        if number and not work.has_time("step", name, SECONDS_OF_A_SHAPE):
            continue
        with work.spared("step", name):
            _measure_shape(work, name, shape, model, platform)


def _measure_shape(work: Work, name: str, shape: Shape, model: Path, platform: Platform) -> None:
    """Measure both in turns if they fit the memory together, else one after the other."""

    def take_turns(**acts: turns.Act) -> dict[str, float]:
        return turns.take_turns(acts, platform, NUM_ROUNDS, lambda: work.seconds_left > 0)

    given = shape, model, work.architecture, platform
    seconds: dict[str, float] = {}
    note = ""
    with our_step(*given) as ours:
        gib = turns.measure_peak(ours, platform).whole
        # What an error holds of the memory is free only after its clause.
        with contextlib.suppress(torch.OutOfMemoryError), their_step(*given) as theirs:
            seconds = take_turns(ours=ours, theirs=theirs)
        if not seconds:
            turns.release(platform)
            seconds = take_turns(ours=ours)
            note = "one after the other: both do not fit the memory"
    del ours
    turns.release(platform)
    if "theirs" not in seconds:
        with contextlib.suppress(torch.OutOfMemoryError), their_step(*given) as theirs:
            seconds |= take_turns(theirs=theirs)
        if "theirs" not in seconds:
            note = "transformers is out of memory"
        turns.release(platform)
    operations = Operations(
        work.architecture, shape.prompt, shape.response, shape.num_responses, shape.num_groups
    ).count()
    figures = {way: shape.num_tokens / value for way, value in seconds.items()}
    figures |= {"gib": gib, "tflops": operations / seconds["ours"] / 1e12}
    if "theirs" in figures:
        figures["vs_transformers"] = figures["ours"] / figures["theirs"]
    work.add("step", name, note, **figures)


@contextlib.contextmanager
def our_step(shape: Shape, model: Path, architecture: Architecture, platform: Platform) -> Iterator[turns.Act]:
    """Set up a step as a run makes it, and check that it trains on the responses of the shape, no more."""
    from megatron_rl.command_line import parse as command_line
    from megatron_rl.trainer.loop.measures import Learned
    from megatron_rl.trainer.mcore.session import start_session

    sequences = shape.num_responses * shape.groups_at_once
    words = FLAGS.format(
        groups=shape.num_groups, k=shape.num_responses, sequences=sequences, length=shape.prompt + shape.response,
        r=shape.response,
    )  # fmt: skip
    precision = ["--bf16"] if architecture.dtype == "bfloat16" else []
    where = ["--platform", platform.name, "--hf-model", str(model)]
    slot = shared_prompt_step.draw_slot(
        shape.prompt, shape.response, shape.num_responses, architecture.vocab_size, shape.groups_at_once
    )
    settings = command_line.parse([*words.split(), *precision, *where])
    with start_session(settings) as session:
        step = shared_prompt_step.our_step(settings, session, slot)
        learned = step()
        assert isinstance(learned, Learned)
        check_count(shape, learned.measures.sums["targets"])
        yield step


def check_count(shape: Shape, num_trained: float) -> None:
    """Raise unless the step trained on as many response tokens as the shape has."""
    if num_trained != shape.num_tokens:
        raise RuntimeError(
            f"a step of {shape} must train on {shape.num_tokens:,} response tokens, and trained on {num_trained:,.0f}: "
            "its slots must have the groups of one micro-batch each"
        )


@contextlib.contextmanager
def their_step(shape: Shape, model: Path, architecture: Architecture, platform: Platform) -> Iterator[turns.Act]:
    """Set up the same step by transformers, with the fastest micro-batch of those that fit."""
    import transformers

    device, dtype = platform.device(), getattr(torch, architecture.dtype)
    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa")
    policy.to(device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    length = shape.prompt + shape.response
    num_sequences = shape.num_groups * shape.num_responses
    tokens_BS = torch.randint(0, architecture.vocab_size, (num_sequences, length), device=device)
    advantages_B1 = torch.randn(num_sequences, 1, device=device)

    def step(sequences: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        for some_BS, their_B1 in zip(tokens_BS.split(sequences), advantages_B1.split(sequences), strict=True):
            hidden_BRE = policy.model(input_ids=some_BS, use_cache=False).last_hidden_state[:, shape.prompt - 1 : -1]
            all_BRV = torch.log_softmax(policy.lm_head(hidden_BRE).float(), dim=-1)
            log_probs_BR = all_BRV.gather(-1, some_BS[:, shape.prompt :, None]).squeeze(-1)
            ratios_BR = torch.exp(log_probs_BR - log_probs_BR.detach())
            (-(ratios_BR * their_B1).sum() / shape.num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()

    yield functools.partial(step, find_fastest(step, num_sequences, platform))


def find_fastest(step: Callable[[int], None], num_sequences: int, platform: Platform) -> int:
    """Return the sequences of the fastest micro-batch; raise if none fits the memory."""
    seconds: dict[int, float] = {}
    # A larger one needs more memory, so the first that does not fit is the last that is tried.
    with contextlib.suppress(torch.OutOfMemoryError):
        for sequences in sorted({min(sequences, num_sequences) for sequences in SEQUENCES_TRIED}):
            act = functools.partial(step, sequences)
            if not seconds:
                # The first step makes the optimizer's state.
                act()
            seconds[sequences] = turns.time_once(act, platform)
    turns.release(platform)
    if not seconds:
        raise torch.OutOfMemoryError(f"transformers does not fit with {min(SEQUENCES_TRIED)} sequences at once")
    return min(seconds, key=lambda sequences: seconds[sequences])
