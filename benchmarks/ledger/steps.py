"""The training steps that were measured on an H200, and the count of such a step."""

import collections
import dataclasses
import gc
import json
import tempfile
from pathlib import Path

from benchmarks import shared_prompt_step
from benchmarks.ledger.counting import Counter, Entry, Routing
from megatron_rl.shared.weights.families import derive_config
from megatron_rl.types import Architecture, Experts

FLAGS = (
    "--platform cuda --bf16 --train-iters 1000 --lr 1e-6 --lr-decay-style constant --grpo-prompts-per-step {groups} "
    "--grpo-group-size {k} --micro-batch-size {sequences} --seq-length {length} --rollout-max-tokens {r} "
)


def _draw_up(
    num_layers: int, hidden_size: int, ffn_hidden_size: int, num_heads: int, vocab_size: int = 151_936
) -> Architecture:
    return Architecture(
        family="qwen3", num_layers=num_layers, hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size,
        num_attention_heads=num_heads, num_query_groups=8, kv_channels=128, vocab_size=vocab_size,
        max_position_embeddings=32_768, tied_embeddings=True, qk_layernorm=True,
    )  # fmt: skip


EXPERTS = dataclasses.replace(
    _draw_up(48, 2048, 768, 32), family="qwen3_moe", num_query_groups=4, tied_embeddings=False,
    experts=Experts(num_experts=128, num_active=8, ffn_hidden_size=768),
)  # fmt: skip
FEW_EXPERTS = dataclasses.replace(
    _draw_up(2, 256, 64, 8, vocab_size=4096), family="qwen3_moe",
    experts=Experts(num_experts=4, num_active=2, ffn_hidden_size=64),
)  # fmt: skip
MODELS = {
    "tiny": _draw_up(2, 256, 512, 8, vocab_size=4096),
    "0.6b": _draw_up(28, 1024, 3072, 16),
    "1.7b": _draw_up(28, 2048, 6144, 16),
    "4b": _draw_up(36, 2560, 9728, 32),
    "30b-a3b": EXPERTS,
    "tiny-experts": FEW_EXPERTS,
}


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of a model, and the response tokens a second that were measured on an H200; 0 if none were."""

    model: str
    prompt: int
    response: int
    num_responses: int
    num_groups: int
    groups_at_once: int
    measured: float = 0.0
    backend: str = "triton"
    shares_prompt: bool = True

    @property
    def num_tokens(self) -> int:
        """The number of response tokens."""
        return self.num_groups * self.num_responses * self.response

    @property
    def num_rows(self) -> int:
        """The number of rows of a micro-batch."""
        prompts = 1 if self.shares_prompt else self.num_responses
        return self.groups_at_once * (self.prompt * prompts + self.num_responses * self.response)

    @property
    def num_micro_batches(self) -> int:
        return self.num_groups // self.groups_at_once

    def __str__(self) -> str:
        way = self.backend if self.shares_prompt else "no shared prompt"
        shape = f"{self.prompt}/{self.response}/{self.num_responses} x {self.num_groups}"
        return f"{self.model} {shape}, {self.groups_at_once} at once, {way}"


SMALL = Step("0.6b", 16, 512, 8, 8, 1, 32_500)
MIDDLE = Step("0.6b", 512, 1024, 8, 4, 1, 44_300)
LARGE = Step("4b", 2048, 1024, 8, 1, 1, 10_400)
MEASURED = (
    SMALL,
    MIDDLE,
    Step("0.6b", 512, 1024, 8, 16, 4, 52_300),
    Step("0.6b", 4096, 1024, 16, 4, 2, 33_200),
    Step("1.7b", 1024, 1024, 8, 2, 1, 26_900),
    LARGE,
    Step("0.6b", 512, 1024, 8, 16, 4, 45_300, backend="merge"),
    Step("0.6b", 512, 1024, 8, 16, 4, 48_600, backend="gather"),
    Step("0.6b", 512, 1024, 8, 4, 1, 38_700, shares_prompt=False),
    Step("0.6b", 512, 1024, 8, 16, 4, 42_300, shares_prompt=False),
)
TINY = Step("tiny", 16, 8, 2, 4, 2)
# Layers with experts; no such step was measured.
SPARSE = Step("30b-a3b", 512, 1024, 8, 4, 1)
TINY_SPARSE = Step("tiny-experts", 16, 8, 2, 4, 2)


def count(step: Step, num_layers: int | None = None) -> Counter:
    """Count one step, after a first one, which prepares what later ones find ready.

    Two micro-batches are counted at most, because all of them are alike.
    """
    from megatron_rl.command_line import parse as command_line
    from megatron_rl.trainer.mcore.session import start_session

    model = MODELS[step.model]
    model = dataclasses.replace(model, num_layers=num_layers or model.num_layers)
    experts, routing = model.experts, None
    if experts is not None:
        routing = Routing(experts.num_experts, step.num_rows * experts.num_active // experts.num_experts)
    words = FLAGS.format(
        groups=step.groups_at_once * min(2, step.num_micro_batches), k=step.num_responses,
        sequences=step.groups_at_once * step.num_responses, length=step.prompt + step.response, r=step.response,
    ).split()  # fmt: skip
    words += ["--shared-prompt-backend", step.backend] if step.shares_prompt else ["--no-shared-prompt"]
    slot = shared_prompt_step.draw_slot(
        step.prompt, step.response, step.num_responses, model.vocab_size, step.groups_at_once
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(derive_config(model)))
        settings = command_line.parse([*words, "--hf-model", folder])
        with start_session(settings) as session:
            act = shared_prompt_step.our_step(settings, session, slot)
            for _ in range(2):
                with Counter(routing) as counter:
                    act()
            del act
    gc.collect()
    return counter


def count_step(step: Step) -> list[Entry]:
    """Count all micro-batches of a step, and its update."""
    return count(step).list_step(step.num_micro_batches)


def count_layer(step: Step) -> dict[Entry, int]:
    """Count a layer of a micro-batch, forward and backward: how often it has each entry."""
    shallow, deep = (collections.Counter(count(step, num_layers).list_micro_batch()) for num_layers in (2, 3))
    return dict(deep - shallow)
