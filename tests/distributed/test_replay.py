"""Routers that take given experts: log-probs and gradients are those of transformers with the same experts."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from megatron_rl.shared.protocol.wire import GroupPart, encode_experts, encode_tokens
from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.trainer.data.packing import Pack, pack_groups
from megatron_rl.trainer.data.routing import lay_out_routing
from megatron_rl.trainer.mcore.model.replay import RouterReplay, replay_routing, take_counts
from megatron_rl.trainer.mcore.session import start_session as start_run_session
from megatron_rl.trainer.mcore.step.forward_step import Unreplayed, is_reporter, measure_unreplayed
from megatron_rl.trainer.mcore.step.policy import build_policy, build_reference
from megatron_rl.trainer.mcore.step.roles import build_roles
from megatron_rl.types import Architecture
from tests import hf_models
from tests.distributed import parity
from tests.distributed.layouts import CASES, Model, build, divisor, start_session
from tests.distributed.training import settings_of
from tests.ranks import run_ranks
from tests.truth import everything_in
from tests.unit.test_slots import response

WORDS = (
    "--lr 1e-3 --lr-decay-style constant --train-iters 1 --grpo-group-size 2 --grpo-prompts-per-step 2 "
    "--global-batch-size 2 --seq-length 32 --rollout-max-tokens 8 --grpo-kl-beta 0.1"
)
RECOMPUTED = {
    "all": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "experts": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}
Runs = dict[str, tuple[str, ...]]
"""The layouts of each model; "all" or "experts" after a layout is computed again in the backward pass."""
RUNS: Runs = {"glm4_moe": ("TP2+SP,EP2,ETP1", "EP2xCP2 experts", "PP2xVPP2 all")}
MORE_RUNS: Runs = {
    "glm4_moe": ("DP2+distopt", "EP2xCP2", "PP2", "PP2xVPP2", "PP2 experts"),
    **dict.fromkeys(("qwen3_moe", "qwen2_moe", "mixtral"), ("EP2xCP2",)),
}


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A group whose experts were drawn at random: [tokens, layers, experts of a token]."""

    prompt: list[int]
    responses: list[list[int]]
    experts_of_prompt: np.ndarray
    experts: list[np.ndarray]
    """Those of each response's tokens but the last."""


def draw_experts(architecture: Architecture) -> list[list[Drawn]]:
    """Draw experts for the groups of `parity`, so that almost no token goes where its router would send it."""
    generator = np.random.default_rng(5)
    experts = architecture.experts

    def draw(num_tokens: int) -> np.ndarray:
        shape = (num_tokens, architecture.num_layers, experts.num_experts)
        return generator.random(shape).argsort(axis=-1)[..., : experts.num_active].astype(np.uint8)

    return [
        [
            Drawn(prompt, responses, draw(len(prompt)), [draw(len(tokens) - 1) for tokens in responses])
            for prompt, responses in groups
        ]
        for groups in parity.micro_batches()
    ]


def make_packs(architecture: Architecture, multiple_of: int) -> list[Pack]:
    """Pack the groups with their experts, as they come in slots."""
    return [make_pack(groups, architecture, multiple_of) for groups in draw_experts(architecture)]


def make_pack(groups: list[Drawn], architecture: Architecture, multiple_of: int) -> Pack:
    parts = [
        GroupPart(
            prompt_index=number,
            row="",
            prompt_tokens=encode_tokens(group.prompt),
            first_response=0,
            responses=[
                msgspec.structs.replace(response(len(tokens), 0.0), experts=encode_experts(experts))
                for tokens, experts in zip(group.responses, group.experts, strict=True)
            ],
            rewards=[0.0] * len(group.responses),
            prompt_experts=encode_experts(group.experts_of_prompt),
        )
        for number, group in enumerate(groups)
    ]
    pack = pack_groups([(group.prompt, group.responses) for group in groups], multiple_of)
    return dataclasses.replace(pack, routing=lay_out_routing(parts, architecture, True, pack.num_tokens))


def replay_by_transformers(folder: Path, dtype: torch.dtype) -> parity.Computed:
    """Compute the same by definition: each response after a copy of its prompt, with the weights of given experts."""
    architecture = read_architecture(folder)
    experts = architecture.experts
    with everything_in(dtype):
        model = hf_models.load(folder, dtype)
        given: list[np.ndarray] = []

        def send(layer: int, logits_RX: torch.Tensor, own_RK: torch.Tensor) -> tuple[torch.Tensor, ...]:
            chosen_RK = own_RK.clone()
            chosen_RK[: len(given[0])] = torch.from_numpy(given[0][:, layer].astype(np.int64))
            scores_RX = logits_RX.sigmoid() if experts.score == "sigmoid" else logits_RX.softmax(-1)
            weights_RK = scores_RX.gather(1, chosen_RK)
            if experts.normalize_weights:
                weights_RK = weights_RK / weights_RK.sum(-1, keepdim=True)
            return logits_RX, weights_RK * experts.scaling_factor, chosen_RK

        for layer in filter(architecture.has_experts, range(architecture.num_layers)):
            model.model.layers[layer].mlp.gate.register_forward_hook(
                lambda _, __, output, layer=layer: send(layer, output[0], output[2])
            )
        log_probs = []
        for groups in draw_experts(architecture):
            of_pack = []
            for num_prompt, tokens, given_RLK in list_sequences(groups):
                given[:] = [given_RLK]
                (values,) = hf_models.decode_log_probs(model, [tokens])
                of_pack.append(values[num_prompt - 1 :])
            log_probs.append(torch.cat(of_pack))
    sum(parity.shared_loss(log_probs_N) for log_probs_N in log_probs).backward()
    return parity.Computed([log_probs_N.detach() for log_probs_N in log_probs], hf_models.gradients_of(model))


def list_sequences(groups: list[Drawn]) -> Iterator[tuple[int, list[int], np.ndarray]]:
    """Yield each prompt's length, its tokens with those of a response, and the experts of the tokens that were fed."""
    for group in groups:
        for tokens, experts in zip(group.responses, group.experts, strict=True):
            yield len(group.prompt), group.prompt + tokens, np.concatenate([group.experts_of_prompt, experts])


def replay_in_layouts(
    runs: Runs, folders: dict[str, Path]
) -> dict[tuple[str, str], tuple[parity.Computed, dict[str, float]]]:
    """Compute every model on each rank in its layouts, with the given experts, and this rank's counts of them."""
    torch.distributed.init_process_group("gloo")
    results = {}
    for family, names in runs.items():
        for name in names:
            layout, _, recomputed = name.partition(" ")
            case = CASES[layout]
            with start_session(case) as session:
                model = build(session, case, folders[family], **RECOMPUTED.get(recomputed, {}))
                replay_routing(model.chunks)
                packs = make_packs(model.architecture, divisor(case.sizes) * 3)
                alone = model.forward(packs)
                assert take_counts(model.chunks) == {}
                check_unreplayed(model, packs)
                log_probs = model.forward_backward(packs, parity.shared_loss)
                assert all(map(torch.equal, alone, log_probs))
                counts = take_counts(model.chunks)
                routers = [m.router_replay for c in model.chunks for m in c.modules() if hasattr(m, "router_replay")]
                assert routers
                assert all(isinstance(one, RouterReplay) and not one._kept for one in routers)
                results[family, name] = (parity.Computed(log_probs, model.gradients()), counts)
    return results


@dataclasses.dataclass(frozen=True)
class Apart:
    """A slot whose engine's log-probs are half a nat above those of the routers' own choice."""

    pack: Pack
    own_log_probs_N: torch.Tensor

    @property
    def engine_log_probs_N(self) -> torch.Tensor:
        return self.own_log_probs_N + 0.5

    @property
    def num_targets(self) -> int:
        return len(self.own_log_probs_N)


def check_unreplayed(model: Model, packs: list[Pack]) -> None:
    """Check the mismatch without replay on the first slots, every tenth version and on reporting ranks alone."""
    plain = [dataclasses.replace(pack, routing=None) for pack in packs]
    batches = [Apart(*pair) for pair in zip(model.mine(packs), model.mine(model.forward(plain)), strict=True)]

    def measure(version: int) -> Unreplayed | None:
        slots = SimpleNamespace(identity=SimpleNamespace(version=version), batch=batches.__getitem__)
        return measure_unreplayed(model.wrapped, slots, 1.0)

    count = parallel_state.get_pipeline_model_parallel_world_size() if len(model.chunks) > 1 else 1
    num_tokens = sum(batch.num_targets for batch in batches[:count])
    found = measure(20)
    assert (found is not None) == is_reporter()
    assert found is None or (found.num_tokens, found.total) == (num_tokens, pytest.approx(num_tokens / 2))
    assert measure(21) is None


def build_roles_of_a_run(folder: Path) -> dict[str, int]:
    """Count the routers that replay among those of each role."""
    torch.distributed.init_process_group("gloo")
    settings = settings_of(folder, f"{WORDS} --rollout-replay-routing")
    with start_run_session(settings) as session:
        policy = build_policy(settings, session, 4)
        reference = build_reference(settings, session, folder)
        roles = build_roles(settings, session, policy, {"reference": reference}, 2)
        models = {"policy": policy.chunks, "old": roles._old, "reference": reference.models}
        return {
            role: sum(isinstance(getattr(m, "router_replay", None), RouterReplay) for c in chunks for m in c.modules())
            for role, chunks in models.items()
        }


@pytest.mark.each_change
def test_the_policy_and_the_old_policy_replay_and_the_reference_does_not(tmp_path: Path) -> None:
    folder = hf_models.draw("glm4_moe", tmp_path / "model")
    assert run_ranks(build_roles_of_a_run, 1, folder) == [{"policy": 3, "old": 3, "reference": 0}]


@pytest.mark.parametrize(
    "runs", [pytest.param(RUNS, marks=pytest.mark.each_change), pytest.param(MORE_RUNS, marks=pytest.mark.slow)]
)
def test_given_experts_are_replayed_in_every_layout_forward_and_backward(runs: Runs, tmp_path: Path) -> None:
    folders = {family: hf_models.draw(family, tmp_path / family) for family in runs}
    ranks = run_ranks(replay_in_layouts, 2, runs, folders)
    for family, folder in folders.items():
        expected = parity.Expected(*(replay_by_transformers(folder, dtype) for dtype in (torch.float32, torch.float64)))
        architecture = read_architecture(folder)
        num_fed = sum(p + sum(r) - len(r) for batch in parity.SHAPES for p, r in batch)
        wanted = num_fed * architecture.num_expert_layers * architecture.experts.num_active
        for name in runs[family]:
            worst = expected.worst(ranks[0][family, name][0])
            print(family, name, worst)
            assert max(error for error, _ in worst.values()) <= 1, (family, name)
            counts = [results[family, name][1] for results in ranks]
            assert sum(one["routing.replayed"] for one in counts) == wanted, (family, name)
            share = sum(one["routing.changed"] for one in counts) / wanted
            # Drawn at random among 4 or 8 experts, of which 2 are chosen.
            assert 0.4 < share < 0.85, (family, name, share)
