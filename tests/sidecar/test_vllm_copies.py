"""A real vLLM whose layers compute with their parameters as they are: weights are copied into them in place."""

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file

from megatron_rl.shared.protocol.wire import FileSource, PublishAnswer, Weights
from megatron_rl.shared.weights.files import write_digests
from megatron_rl.shared.weights.fingerprint import compute_fingerprint, digest
from megatron_rl.shared.weights.offer import Offer, write_offer
from megatron_rl.sidecar.engines import WeightReport, WrongWeights
from megatron_rl.sidecar.vllm.engine import VllmEngine
from megatron_rl.sidecar.vllm.received import list_specs
from tests.offers import Ranks
from tests.ranks import run_ranks
from tests.sidecar import vllm_models
from tests.sidecar.offering_ranks import NUM_VERSIONS, Mail, offer_versions
from tests.sidecar.vllm_models import (
    Models,
    Reference,
    Run,
    configure,
    generate,
    in_shared_memory,
    publish,
    put,
    request,
    started,
)

pytestmark = pytest.mark.each_change

NUM_TOKENS = 16


@pytest.fixture(scope="module")
def copying(run: Run, models: Models) -> Iterator[VllmEngine]:
    """Start an engine that copies weights in place."""
    with started(run, configure(models.first, "tests.sidecar.in_place_extension.Extension")) as engine:
        yield engine


def call(run: Run, engine: VllmEngine, method: str, *arguments: str) -> dict:
    return run(engine._workers("load", f"megatron_rl_{method}", *arguments))[0]


def load(run: Run, engine: VllmEngine, model: Path) -> WeightReport:
    with in_shared_memory(model, 17) as weights:
        return vllm_models.load(run, engine, weights)


@contextlib.contextmanager
def offered(ranks: Ranks, model: Path, version: int, **changes: Any) -> Iterator[Weights]:
    """Publish a model's weights without a file of tensors: their digests, and an offer of the ranks' memory."""
    tensors = load_file(model / "model.safetensors")
    ranks.put(tensors)
    digests = {name: digest(tensor).tolist() for name, tensor in tensors.items()}
    fingerprint = compute_fingerprint(list_specs(tensors), digests)
    folder = Path(tempfile.mkdtemp(prefix="megatron-rl-test-", dir="/dev/shm"))
    try:
        write_digests(folder, digests)
        offer: Offer = msgspec.structs.replace(ranks.offer(fingerprint), **changes)
        write_offer(folder, offer)
        yield Weights(run="test", version=version, fingerprint=fingerprint, dtype="float32",
                      source=FileSource(folder=str(folder)))  # fmt: skip
    finally:
        shutil.rmtree(folder)


def test_after_a_copy_in_place_every_greedy_token_is_that_of_the_new_weights(run, copying, models):
    assert call(run, copying, "learn_order")["obstacles"] == []
    before = call(run, copying, "count_reloads")
    asked = [request(number, temperature=0.0, max_tokens=NUM_TOKENS) for number in range(8)]
    for version, model in enumerate((models.second, models.first, models.second)):
        put(run, copying, model, version)
        reference, groups = Reference(model), generate(run, copying, *asked)
        counts = [reference.num_greedy(one, group[0]) for one, group in zip(asked, groups, strict=True)]
        assert sum(counts) == len(asked) * NUM_TOKENS
    report = load(run, copying, models.first)
    assert report.num_compared == report.num_parameters > 0
    # vLLM itself loaded nothing.
    assert call(run, copying, "count_reloads") == before


def test_weights_that_are_offered_are_copied_and_proven_without_any_file_of_tensors(run, copying, models):
    ranks = Ranks(load_file(models.first / "model.safetensors"))
    before = call(run, copying, "count_reloads")
    for version, model in enumerate((models.second, models.first, models.second), start=20):
        with offered(ranks, model, version) as weights:
            run(publish(copying, weights))
            report = vllm_models.load(run, copying, weights)
            assert (report.through, report.reasons) == ("ipc", ())
            assert report.num_compared == report.num_parameters > 0
            run(publish(copying, weights))
        asked = request(version, temperature=0.0, max_tokens=NUM_TOKENS)
        assert Reference(model).num_greedy(asked, run(copying.generate(asked))[0]) == NUM_TOKENS
    assert call(run, copying, "count_reloads") == before


def test_weights_that_change_while_they_are_copied_are_found_and_the_error_names_the_way(run, copying, models):
    ranks = Ranks(load_file(models.first / "model.safetensors"))
    with offered(ranks, models.second, 25) as weights:
        ranks.memories[1][-4:] += 1
        with pytest.raises(WrongWeights, match="1 tensors do not hold .* copied from the trainer's devices"):
            vllm_models.load(run, copying, weights)
    put(run, copying, models.first, 26)


def test_an_engine_that_cannot_open_an_offer_takes_the_files_and_says_why_once(run, copying, models, caplog):
    caplog.set_level(logging.INFO)
    ranks = Ranks(load_file(models.first / "model.safetensors"))
    for version in (27, 28):
        with offered(ranks, models.second, version, host=("elsewhere",)) as weights:
            for path in models.second.glob("*.safetensors"):
                shutil.copyfile(path, Path(weights.folder) / path.name)
                (Path(weights.folder) / path.name).chmod(0o600)
            report = vllm_models.load(run, copying, weights)
            run(publish(copying, weights))
        assert report.through == "files"
        assert ["another host" in reason for reason in report.reasons] == [True]
        assert report.num_compared == report.num_parameters
    assert sum("it reads weights from files" in record.message for record in caplog.records) == 1


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="megatron-rl-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.timeout(600)
def test_vllm_holds_what_two_tensor_parallel_ranks_of_megatron_offer_version_after_version(
    run, copying, models, tmp_path: Path, memory: Path
) -> None:
    mail = Mail(tmp_path)
    probes = []
    with ThreadPoolExecutor(1) as pool:
        ranks = pool.submit(run_ranks, offer_versions, 2, "TP2", models.first, memory, tmp_path)
        for version in range(NUM_VERSIONS):
            weights = mail.receive(f"weights-{version}", Weights, ranks)
            try:
                probes.append(run(publish(copying, weights)))
                report = vllm_models.load(run, copying, weights)
            except Exception as error:
                mail.send(f"answer-{version}", PublishAnswer(reasons=(str(error),)))
                raise
            assert (report.through, report.reasons) == ("ipc", ())
            assert report.num_compared == report.num_parameters > 0
            mail.send(f"answer-{version}", PublishAnswer(through=report.through))
        assert all(num_shared > 0 for num_shared in ranks.result())
    assert len({tuple(log_probs) for log_probs in probes}) == NUM_VERSIONS


def test_any_tensor_that_a_copy_leaves_out_is_found_in_the_parameters(run, copying, models):
    for name in load_file(models.first / "model.safetensors"):
        load(run, copying, models.first)
        call(run, copying, "leave_out", name)
        with pytest.raises(WrongWeights, match=f"engine-0, worker 0, load: 1 tensors do not hold .*: {name}$"):
            load(run, copying, models.second)
        call(run, copying, "leave_out", "")
    put(run, copying, models.first, 18)


def test_a_layer_that_keeps_a_copy_of_its_parameter_is_found_at_the_start_and_loaded_by_vllm(
    run, copying, models, caplog
):
    """Plant the copy, which no digest of parameters shows, and have the engine tried again."""
    caplog.set_level(logging.INFO)
    call(run, copying, "keep_copies")
    adopted = VllmEngine("adopted", copying.address)
    run(adopted.start())
    reason = "after a copy, the log-probs of the probe are others than after vLLM's reload"
    assert [record.levelname for record in caplog.records if reason in record.message] == ["INFO"]
    before = call(run, adopted, "count_reloads")["reloads"]
    put(run, adopted, models.second, 19)
    assert call(run, adopted, "count_reloads")["reloads"] == before + 1
    asked = request(9, temperature=0.0, max_tokens=NUM_TOKENS)
    (response,) = run(adopted.generate(asked))
    assert Reference(models.second).num_greedy(asked, response) == NUM_TOKENS
    run(adopted.close())
