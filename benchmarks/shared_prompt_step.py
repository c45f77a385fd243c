"""Take a training step of a small Qwen3 on one group, from slot to update, in three ways that learn the same.

Letters: B sequences, S tokens of the longest.
"""

import copy
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks import random_models
from megatron_rl.config.settings import Settings
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.turns import list_rewards
from megatron_rl.types import Architecture

if TYPE_CHECKING:
    from megatron_rl.trainer.mcore.session import Session

ARCHITECTURE = Architecture(
    family="qwen3", num_layers=8, hidden_size=256, ffn_hidden_size=768, num_attention_heads=8, num_query_groups=4,
    kv_channels=64, vocab_size=8192, max_position_embeddings=4096, tied_embeddings=True, qk_layernorm=True,
)  # fmt: skip
FLAGS = (
    "--platform cpu --train-iters 1000 --lr 1e-5 --lr-decay-style constant --grpo-prompts-per-step {groups} "
    "--grpo-group-size {k} --micro-batch-size {k} --seq-length {length} --rollout-max-tokens {r}"
)


def times(prompt: int, response: int, num_responses: int, rounds: int) -> dict[str, list[float]]:
    """Return seconds of each way, in turns, on one thread."""
    from megatron_rl.command_line import parse as command_line
    from megatron_rl.trainer.mcore.session import start_session

    torch.set_num_threads(1)
    slot = draw_slot(prompt, response, num_responses)
    words = FLAGS.format(groups=1, k=num_responses, r=response, length=prompt + response)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        random_models.make(model, ARCHITECTURE)
        parse = [*words.split(), "--hf-model", str(model)]
        shared, separate = command_line.parse(parse), command_line.parse([*parse, "--no-shared-prompt"])
        with start_session(shared) as session:
            ways = {
                "shared prompt": our_step(shared, session, slot),
                "--no-shared-prompt": our_step(separate, session, slot),
                "Megatron's model, a batch": megatrons_step(shared, session, slot),
            }
            return time_in_turns(ways, rounds)


def time_in_turns(
    ways: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Return seconds of each way, round by round, by the clock."""
    measured: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, step in ways.items():
            start = clock()
            step()
            measured[name].append(clock() - start)
    # The first round prepares what the others find ready.
    return {name: values[1:] for name, values in measured.items()}


def draw_slot(
    prompt: int, response: int, num_responses: int, vocab_size: int = ARCHITECTURE.vocab_size, num_groups: int = 1
) -> wire.Slot:
    """Draw groups of random tokens and rewards, of one micro-batch."""
    draw = np.random.default_rng(0)

    def draw_response(number: int) -> wire.Response:
        return wire.Response(
            tokens=wire.encode_tokens(draw.integers(0, vocab_size, response).tolist()),
            log_probs=wire.encode_log_probs(np.full(response, -9.0)),
            finish_reason="stop",
            seed=number,
            engine="0",
            spans=[wire.VersionSpan(version="1", start=0, end=response)],
            fingerprint="weights",
            reward=float(number % 2),
        )

    def draw_part(index: int) -> wire.GroupPart:
        responses = [draw_response(number) for number in range(num_responses)]
        return wire.GroupPart(
            prompt_index=index, row=f"row-{index}", first_response=0, responses=responses,
            prompt_tokens=wire.encode_tokens(draw.integers(0, vocab_size, prompt).tolist()),
            rewards=list_rewards(responses),
        )  # fmt: skip

    parts = [draw_part(index) for index in range(num_groups)]
    return wire.Slot(run="run", version=1, fingerprint="weights", replica=0, index=0, parts=parts)


def our_step(settings: Settings, session: "Session", slot: wire.Slot) -> Callable[[], object]:
    """Return a step as a run makes it, which returns what it learned; each of its micro-batches is the slot."""
    from megatron_rl.algorithm.objective import Objective
    from megatron_rl.command_line.run import compute_sizes
    from megatron_rl.trainer.data.device_copier import DeviceCopier
    from megatron_rl.trainer.data.slots import Identity, IterationSlots
    from megatron_rl.trainer.loop.learner import Learner
    from megatron_rl.trainer.loop.rollouts import build_batcher
    from megatron_rl.trainer.mcore.step.policy import build_policy
    from megatron_rl.trainer.mcore.step.roles import build_roles

    assert settings.training.train_iters is not None
    sizes = compute_sizes(settings, 1)
    policy = build_policy(settings, session, settings.training.train_iters)
    roles = build_roles(settings, session, policy, {}, 1)
    learner = Learner(policy, roles, Objective(settings.algorithm, sizes.longest_response), session)
    batcher = build_batcher(settings, session.device)
    max_turns = settings.environment.max_turns if settings.environment.source else 0
    identity = Identity(slot.run, slot.version, slot.fingerprint)

    def step() -> object:
        slots = IterationSlots(
            lambda index: slot, batcher, sizes.division, identity, DeviceCopier(session.platform), max_turns=max_turns
        )
        learned = learner.learn(slots)
        slots.close()
        return learned

    return step


def megatrons_step(settings: Settings, session: "Session", slot: wire.Slot) -> Callable[[], object]:
    """Return a step of megatron-core's own GPTModel on whole sequences in a batch, with our optimizer.

    It computes all logits.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron_rl.trainer.mcore.model.gpt import wrap
    from megatron_rl.trainer.mcore.step.forward_step import ForwardStep, loss_scale, run_schedule
    from megatron_rl.trainer.mcore.step.optimizer import apply_update, build_optimizer, build_scheduler

    config = copy.copy(settings.transformer)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=ARCHITECTURE.vocab_size,
        max_sequence_length=ARCHITECTURE.max_position_embeddings,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        rotary_base=int(ARCHITECTURE.rope.base),
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    assert settings.training.train_iters is not None
    wrapped = wrap([model], settings.ddp)
    optimizer = build_optimizer(settings, wrapped)
    learning_rates = build_scheduler(settings, optimizer, settings.training.train_iters)
    batch = Sequences.of(slot)

    class BatchStep(ForwardStep):
        def forward_step(self, data_iterator: Iterator[Sequences], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            batch = next(data_iterator)
            output_tensor = model(batch.tokens_BS, batch.positions_BS, batch.hidden_11SS, labels=batch.labels_BS)
            return output_tensor, self.loss_func

        def loss_func(self, output_tensor: torch.Tensor) -> tuple[torch.Tensor, dict]:
            return (output_tensor * batch.weights_BS).sum() * loss_scale(1), {}

    def step() -> None:
        run_schedule(BatchStep(), wrapped, [batch])
        apply_update(optimizer, learning_rates, wrapped, 1.0 / batch.weights_BS.count_nonzero().item())

    return step


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Prompt and response together, one a row, all of one length."""

    tokens_BS: torch.Tensor
    positions_BS: torch.Tensor
    hidden_11SS: torch.Tensor
    labels_BS: torch.Tensor
    weights_BS: torch.Tensor

    @classmethod
    def of(cls, slot: wire.Slot) -> "Sequences":
        (part,) = slot.parts
        prompt = wire.decode_tokens(part.prompt_tokens)
        rows = [np.concatenate([prompt, wire.decode_tokens(response.tokens)]) for response in part.responses]
        tokens_BS = torch.from_numpy(np.stack(rows).astype(np.int64))
        length = tokens_BS.shape[1]
        advantages_B1 = torch.tensor(part.rewards)[:, None] - float(np.mean(part.rewards))
        predicts_a_response = (torch.arange(length) >= len(prompt) - 1) & (torch.arange(length) < length - 1)
        return cls(
            tokens_BS,
            torch.arange(length).expand_as(tokens_BS),
            torch.ones(length, length, dtype=torch.bool).triu(1)[None, None],
            tokens_BS.roll(-1, dims=1),
            advantages_B1 * predicts_a_response,
        )
