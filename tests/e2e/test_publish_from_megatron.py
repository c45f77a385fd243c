"""Weights from real Megatron ranks to real vLLM and back: an engine samples with the weights that the trainer has."""

import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.cli import main as megatron_rl
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.client import RolloutClient, read_token
from megatron_rl.shared.records.audit_check import verify
from megatron_rl.trainer.data.packing import pack_groups
from megatron_rl.trainer.mcore.model.gpt import unwrap
from megatron_rl.trainer.mcore.publish.files import FilesTransport
from megatron_rl.trainer.mcore.publish.probe import Probe
from megatron_rl.trainer.mcore.publish.publisher import Publisher
from megatron_rl.trainer.mcore.step.forward_step import compute_log_probs
from tests import hf_models
from tests.distributed.layouts import CASES, build, start_session
from tests.distributed.parity import expected_at
from tests.ranks import run_ranks
from tests.sidecar.sidecar_process import sidecar
from tests.sidecar.vllm_models import VOCAB_SIZE, draw_with_tokenizer
from tests.truth import error_over_bound

LAYOUTS = ("TP2", "PP2")
TEMPERATURES = (0.7, 1.3)
PLAN = wire.Plan(num_prompts=6, group_size=3, num_replicas=1, micro_batch_size=6)


def train_ranks(model: Path, run: Path, shared: Path) -> list[dict[str, Any]]:
    """Publish weights of each layout's own, twice, and compute the log-probs of what comes back."""
    torch.distributed.init_process_group("gloo")
    results = []
    for number, name in enumerate(LAYOUTS):
        case = CASES[name]
        with start_session(case) as session, client_of(run) as client:
            built = build(session, case, model)
            leases = [client.take_lease(run.name) if session.rank == 0 else 0]
            torch.distributed.broadcast_object_list(leases, 0, group=session.control_group)
            client.use_lease(leases[0])
            probe = Probe([unwrap(chunk) for chunk in built.wrapped], session, run.name, 64, 2)
            folder = shared / run.name
            publisher = Publisher(built.weights, session, client, run.name, FilesTransport(folder), probe=probe)
            for attempt, temperature in enumerate(TEMPERATURES):
                version = number * len(TEMPERATURES) + attempt
                perturb(built, version)
                fingerprint = publisher.publish(version)
                if session.rank == 0:
                    client.submit(submission(run.name, version, fingerprint, temperature))
                found = compare(built, client, version, temperature)
                results.append(found | {"layout": name, "temperature": temperature, "modes": modes(shared)})
                session.barrier()
                if session.rank == 0:
                    client.complete(version)
            publisher.close()
    return results


def client_of(run: Path) -> RolloutClient:
    return RolloutClient((run / "address").read_text().strip(), read_token(run / "token"))


def modes(shared: Path) -> set[int]:
    """Return the modes of the folder that versions are published in, and of all files in it."""
    return {stat.S_IMODE(path.stat().st_mode) for path in (shared, *shared.rglob("*"))}


def perturb(built: Any, version: int) -> None:
    """Make the same change in every layout, so that versions differ and layouts of one version would not."""
    with torch.no_grad():
        for shard in built.weights.shards:
            shard.parameter.mul_(1 + 0.02 * (version + 1))


def submission(run: str, version: int, fingerprint: str, temperature: float) -> wire.Submission:
    tokens = hf_models.sequences([9, 30, 4, 17, 2, 50], seed=version)
    prompts = [wire.Prompt(index=i, row=str(i), tokens=wire.encode_tokens(t)) for i, t in enumerate(tokens)]
    return wire.Submission(
        run=run, version=version, fingerprint=fingerprint, plan=PLAN, prompts=prompts, deadline_seconds=100,
        sampling=wire.Sampling(max_tokens=40, temperature=temperature, ignore_eos=True),
    )  # fmt: skip


def compare(built: Any, client: RolloutClient, version: int, temperature: float) -> dict[str, Any]:
    slots = [client.slot(version, 0, index, 100) for index in range(3)]
    batches, engine = [], []
    for slot in slots:
        batches.append(
            [
                (
                    wire.decode_tokens(part.prompt_tokens).tolist(),
                    [wire.decode_tokens(response.tokens).tolist() for response in part.responses],
                )
                for part in slot.parts
            ]
        )
        log_probs = [wire.decode_log_probs(r.log_probs).copy() for part in slot.parts for r in part.responses]
        engine.append(torch.cat([torch.from_numpy(values) for values in log_probs]))
    packs = [pack_groups(groups, multiple_of=2, vocab_size=VOCAB_SIZE) for groups in batches]
    return {
        "version": version,
        "batches": batches,
        # On the first rank.
        "weights": built.parameters(),
        # The first pipeline stage computes no log-probs.
        "trainer": compute_log_probs(built.wrapped, packs, temperature),
        "engine": engine,
        "fingerprints": {r.fingerprint for slot in slots for part in slot.parts for r in part.responses},
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "is_tied", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.each_change)]
)
def test_engines_sample_with_what_megatron_publishes_and_their_log_probs_are_the_trainers(
    tmp_path: Path, is_tied: bool
) -> None:
    model, run = draw_with_tokenizer(tmp_path / "model", tie_word_embeddings=is_tied), tmp_path / "run"
    words = ("--hf-model", str(model), "--seq-length", "256", "--reward", "length:8", "--platform", "cpu")
    with sidecar(run, *words) as process:
        ranks = run_ranks(train_ranks, 2, model, run, Path("/dev/shm") / f"test-{run.parent.name}")
        assert process.process.poll() is None
    results = [result for rank in ranks for result in rank if result["trainer"]]
    assert {result["version"] for result in results} == {0, 1, 2, 3}
    assert {(result["layout"], result["temperature"]) for result in results} == {
        (layout, temperature) for layout in LAYOUTS for temperature in TEMPERATURES
    }
    weights = {result["version"]: result["weights"] for result in ranks[0]}
    for result in results:
        expected = expected_at(weights[result["version"]], model, result["batches"], result["temperature"])
        for program in ("trainer", "engine"):
            packs = (result[program], expected.theirs.log_probs, expected.truth.log_probs)
            error = error_over_bound(*map(torch.cat, packs))
            print(
                f"{result['layout']}, version {result['version']}, T = {result['temperature']}: log-probs of the "
                f"{program}: error / bound: {error:.2f} over {sum(map(len, result['engine']))} tokens"
            )
            assert error <= 1
    assert set.union(*(result["modes"] for result in results)) == {0o700, 0o600}
    assert len(set.union(*(result["fingerprints"] for result in results))) == 4
    assert megatron_rl(["audit", str(run)]) == 0
    proofs = verify(run).proofs
    print(f"engines' log-probs of the probe differ from the trainer's by {proofs.furthest:.1e} on average")
    assert proofs.num_whole == proofs.num_probed == proofs.num_reports == 4
