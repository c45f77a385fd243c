"""Later updates of an iteration send tokens to the experts that transformers chooses with the old policy's weights."""

import collections
import contextlib
import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from safetensors.torch import load_file, save_file

from megatron_rl.shared.protocol.wire import decode_tokens
from megatron_rl.trainer.data.batch import Batch
from megatron_rl.trainer.data.routing import Routing
from megatron_rl.trainer.loop.learner import Learner
from megatron_rl.trainer.mcore.model import context
from megatron_rl.trainer.mcore.model.replay import RoutingRecord, take_counts
from megatron_rl.trainer.mcore.model.router import select_rows
from megatron_rl.trainer.mcore.session import Session, start_session
from megatron_rl.trainer.mcore.step.forward_step import PolicyStep
from tests import hf_models
from tests.distributed.grpo_trials import Witness, build_run
from tests.distributed.training import LAYOUTS, settings_of
from tests.grpo_problem import SGD, TRUNCATED, Problem, Trial, draw_problem
from tests.grpo_twin import Tensors
from tests.ranks import run_ranks

REPLAYED = "--grpo-replay-routing"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
OF_EXPERTS = "--recompute-granularity selective --recompute-modules moe"
NUM_ITERATIONS = 2
Key = tuple[int, tuple[int, ...]]
"""A layer, and the tokens up to a token, which its experts depend on."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A way of making updates."""

    layout: str
    more: str = REPLAYED
    roles: str = "fused"
    num_updates: int = 2
    has_reference: bool = False
    """True for a reference that has the old policy's weights in the first iteration."""
    fault: str | None = None


@dataclasses.dataclass
class Ran:
    """The results of some iterations; gradients and weights of each update on rank 0."""

    experts: dict[int, dict[Key, frozenset[int]]]
    """The experts of the tokens of all ranks, by update."""
    gradients: list[Tensors]
    weights: list[Tensors]
    counts: dict[str, float]
    """Experts that were replayed, and those among them that the policy's routers would not have chosen."""


LAYOUTS_OF_RANKS = [
    Case("DP2"),
    Case("TP2+SP,EP2,ETP1"),
    Case("EP2xCP2", roles="separate"),
    Case("PP2xVPP2", has_reference=True),
]
PLAIN = Case("DP2", "")
SEPARATE = Case("DP2", roles="separate")
RECOMPUTED = [Case("DP2", f"{REPLAYED} {again}") for again in (FULL, OF_EXPERTS)]
SINGLE = [Case("DP2", num_updates=1), Case("DP2", "", num_updates=1)]
FAULTS = ["off by a token", "off by a layer", "of another micro-batch", "of the last iteration"]
FAULTY = [Case("DP2", fault=fault) for fault in FAULTS]


def run(problem: Problem, cases: Sequence[Case]) -> dict[Case, Ran]:
    torch.distributed.init_process_group("gloo")
    results = {}
    for case in cases:
        rules = dataclasses.replace(TRUNCATED, beta=0.1 if case.has_reference else 0.0)
        trial = Trial(
            case.layout, 4, rules, roles=case.roles, num_updates=case.num_updates, optimizer=SGD, more=case.more
        )
        with (
            start_session(settings_of(problem.policy, LAYOUTS[case.layout])) as session,
            contextlib.ExitStack() as plan,
        ):
            if case.fault is not None:
                plan.enter_context(planted(case.fault))
            results[case] = run_iterations(problem, trial, session, case.has_reference)
    return results


def run_iterations(problem: Problem, trial: Trial, session: Session, has_reference: bool) -> Ran:
    settings = settings_of(problem.policy, f"{LAYOUTS[trial.layout]} {trial.words}")
    one = build_run(session, settings, problem.policy if has_reference else None, NUM_ITERATIONS)
    witness = Witness(one.objective, one.policy, one.model)
    counts: dict[str, float] = collections.Counter()
    learner = Learner(one.policy, one.roles, witness, session)
    with watched(one.policy.chunks, witness) as experts:
        for version in range(NUM_ITERATIONS):
            divided = problem.divided(trial.num_updates)
            learned = one.learn(learner, divided, version, ["reference"] if has_reference and version == 0 else [])
            counts.update({name: value for name, value in learned.measures.sums.items() if name.startswith("routing")})
            assert take_counts(one.policy.chunks) == {}
    everyone: dict[int, dict[Key, frozenset[int]]] = {}
    totals: dict[str, float] = collections.Counter()
    for of_rank, of_routers in session.gather((experts, counts)):
        totals.update(of_routers)
        for update, found in of_rank.items():
            everyone.setdefault(update, {}).update(found)
    return Ran(everyone, witness.gradients, witness.weights, totals)


@contextlib.contextmanager
def watched(chunks: Sequence[Any], witness: Witness) -> Iterator[dict[int, dict[Key, frozenset[int]]]]:
    """Watch where the policy's routers send tokens in passes that train, by update; padding is left out."""
    found: dict[int, dict[Key, frozenset[int]]] = {}
    now: list[tuple[str, Batch]] = []
    begin = PolicyStep._begin

    def begin_pass(self: PolicyStep, role: str, batch: Batch, model: torch.nn.Module) -> None:
        now[:] = [(role, batch)]
        begin(self, role, batch, model)

    def see(router: TopKRouter, _: Any, output: tuple[torch.Tensor, torch.Tensor], chunk: Any) -> None:
        role, batch = now[0]
        if role != "policy" or not torch.is_grad_enabled():
            return
        pack = batch.pack
        mine = select_rows(chunk, context.own_rows(pack.num_tokens, chunk.pg_collection.cp))
        prefixes = list_prefixes(batch)[mine]
        of_update = found.setdefault(len(witness.gradients), {})
        for prefix, chosen_X in zip(prefixes, output[1].tolist(), strict=False):
            experts = frozenset(number for number, is_chosen in enumerate(chosen_X) if is_chosen)
            assert of_update.setdefault((router.layer_number - 1, prefix), experts) == experts

    hooks = [
        module.register_forward_hook(functools.partial(see, chunk=chunk))
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(module, TopKRouter)
    ]
    with mock.patch.object(PolicyStep, "_begin", begin_pass):
        yield found
    for hook in hooks:
        hook.remove()


def list_prefixes(batch: Batch) -> list[tuple[int, ...]]:
    """List the tokens up to each row's, of a batch whose groups share their prompts."""
    prefixes = []
    for part in batch.parts:
        prompt = decode_tokens(part.prompt_tokens).tolist()
        responses = [decode_tokens(response.tokens).tolist() for response in part.responses]
        for begun, tokens in (([], prompt), *((prompt, response) for response in responses)):
            prefixes += [(*begun, *tokens[: end + 1]) for end in range(len(tokens))]
    return prefixes


@contextlib.contextmanager
def planted(fault: str | None) -> Iterator[None]:
    take, kept = RoutingRecord.take, []

    def roll(routing: Routing, dim: int) -> Routing:
        return dataclasses.replace(routing, experts_TLK=routing.experts_TLK.roll(1, dim))

    def wrong(self: RoutingRecord, slot: int, chunk: Any) -> Routing:
        routing = take(self, slot, chunk)
        if fault is None:
            return routing
        if fault == "off by a token":
            return roll(routing, 0)
        if fault == "off by a layer":
            return roll(routing, 1)
        kept.append(routing)
        ago = 1 if fault == "of another micro-batch" else 3
        other = kept[-1 - ago].experts_TLK if len(kept) > ago else routing.experts_TLK
        length = min(len(other), len(routing.experts_TLK))
        experts_TLK = torch.cat([other[:length], routing.experts_TLK[length:]])
        return dataclasses.replace(routing, experts_TLK=experts_TLK)

    with mock.patch.object(RoutingRecord, "take", wrong):
        yield


def choose_by_transformers(folder: Path, weights: Tensors, keys: Sequence[Key]) -> dict[Key, frozenset[int]]:
    """Return the experts that a model with these weights chooses, of those tokens that it decides beyond rounding."""
    with tempfile.TemporaryDirectory() as temporary:
        shutil.copytree(folder, temporary, dirs_exist_ok=True)
        file = Path(temporary) / "model.safetensors"
        save_file(load_file(file) | weights, file, metadata={"format": "pt"})
        model = hf_models.load(Path(temporary))
    chosen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    gates = {layer: one.mlp.gate for layer, one in enumerate(model.model.layers) if hasattr(one.mlp, "gate")}
    for layer, gate in gates.items():
        gate.register_forward_hook(
            lambda gate, _, output, layer=layer: chosen.update(
                {layer: (output[0].sigmoid() + gate.e_score_correction_bias, output[2])}
            )
        )
    prefixes = {prefix for _, prefix in keys}
    longest = [*(prefixes - {prefix[:-1] for prefix in prefixes})]
    # No token sees the padding after a shorter sequence.
    ids_BL = torch.nn.utils.rnn.pad_sequence([torch.tensor(sequence) for sequence in longest], batch_first=True)
    with torch.no_grad():
        model(ids_BL)
    found: dict[Key, frozenset[int]] = {}
    for row, sequence in enumerate(longest):
        own = slice(row * ids_BL.shape[1], row * ids_BL.shape[1] + len(sequence))
        num_clear = len(sequence)
        for layer, (scores_RX, experts_RK) in chosen.items():
            best_LX = scores_RX[own].sort(descending=True).values
            count = experts_RK.shape[1]
            is_clear = best_LX[:, count - 1] - best_LX[:, count] > 2e-5
            for end, experts in enumerate(experts_RK[own][:num_clear].tolist()):
                if is_clear[end]:
                    found[layer, sequence[: end + 1]] = frozenset(experts)
            # Later layers depend on the experts of this token, and of those before.
            num_clear = min(num_clear, int(is_clear.cumprod(0).sum()))
    return found


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    return draw_problem(tmp_path_factory.mktemp("models"), "glm4_moe")


@pytest.fixture(scope="module")
def computed(problem: Problem) -> dict[Case, Ran]:
    return run_ranks(run, 2, problem, [*LAYOUTS_OF_RANKS, PLAIN, *SINGLE])[0]


@pytest.fixture(scope="module")
def computed_slowly(problem: Problem) -> dict[Case, Ran]:
    return run_ranks(run, 2, problem, [Case("DP2"), SEPARATE, *RECOMPUTED, *FAULTY])[0]


def count_strays(problem: Problem, ran: Ran, iteration: int) -> float:
    """Return the share of tokens of an iteration's second update that are not sent where the old policy sends them."""
    first, later = ran.experts[2 * iteration], ran.experts[2 * iteration + 1]
    assert first.keys() != later.keys()
    old = choose_by_transformers(problem.policy, ran.weights[2 * iteration], [*later])
    compared = [key for key in later if key in old]
    assert len(compared) > 0.9 * len(later)
    return sum(later[key] != old[key] for key in compared) / len(compared)


@pytest.mark.each_change
@pytest.mark.parametrize("case", LAYOUTS_OF_RANKS, ids=lambda case: case.layout)
def test_the_second_update_has_the_experts_of_the_old_policy(case, problem, computed) -> None:
    ran = computed[case]
    assert [count_strays(problem, ran, iteration) for iteration in range(NUM_ITERATIONS)] == [0, 0]
    replayed = sum(len(ran.experts[2 * iteration + 1]) for iteration in range(NUM_ITERATIONS))
    assert ran.counts["routing.replayed"] == 2 * replayed
    assert 0 < ran.counts["routing.changed"] < 0.5 * ran.counts["routing.replayed"]


@pytest.mark.each_change
def test_without_the_flag_routers_choose_in_each_update(problem, computed) -> None:
    strays = [count_strays(problem, computed[PLAIN], iteration) for iteration in range(NUM_ITERATIONS)]
    print(f"share of tokens with other experts: {strays}")
    assert min(strays) > 0.01
    assert computed[PLAIN].counts == {}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_what_is_replayed_sends_tokens_elsewhere(fault, problem, computed_slowly) -> None:
    (case,) = [case for case in FAULTY if case.fault == fault]
    strays = [count_strays(problem, computed_slowly[case], iteration) for iteration in range(NUM_ITERATIONS)]
    print(f"{fault}: {strays}")
    assert strays[1] > 0.1


@pytest.mark.slow
def test_separate_roles_and_recomputed_layers_give_the_same_bits(computed_slowly) -> None:
    expected = computed_slowly[Case("DP2")].gradients
    for case in (SEPARATE, *RECOMPUTED):
        check_equal(computed_slowly[case].gradients, expected)


@pytest.mark.each_change
def test_a_single_update_is_the_same_with_and_without_replay(computed) -> None:
    with_flag, without = (computed[case] for case in SINGLE)
    check_equal(with_flag.gradients, without.gradients)
    assert with_flag.experts == without.experts
    # So is the first of two, and the second is not.
    replayed, plain = computed[Case("DP2")].gradients, computed[PLAIN].gradients
    check_equal(replayed[:1], plain[:1])
    assert not all(torch.equal(replayed[1][name], gradient) for name, gradient in plain[1].items())


def check_equal(ours: Sequence[Tensors], theirs: Sequence[Tensors]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], gradient) for name, gradient in other.items())
