"""A real vLLM whose layers compute with their parameters as they are: weights are copied into them in place."""

import dataclasses
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron_rl.sidecar.engines import WeightReport, WrongWeights
from megatron_rl.sidecar.launcher import LocalLauncher
from megatron_rl.sidecar.vllm.engine import VllmEngine
from megatron_rl.sidecar.vllm.factory import VllmFactory
from megatron_rl.sidecar.vllm.server import run_folder
from tests.sidecar import vllm_models
from tests.sidecar.conftest import Run, _kernels
from tests.sidecar.vllm_models import Models, Reference, in_shared_memory, publish, request

pytestmark = pytest.mark.each_change

NUM_TOKENS = 16


@pytest.fixture(scope="module")
def copying(run: Run, models: Models) -> Iterator[VllmEngine]:
    """Start an engine that copies weights in place."""
    config = dataclasses.replace(
        vllm_models.CONFIG,
        model=str(models.first),
        flags=(*vllm_models.CONFIG.flags, "--worker-extension-cls", "tests.sidecar.in_place_extension.Extension"),
        environment={"PYTHONPATH": str(Path(__file__).parents[2]), **_kernels()},
    )
    folder = run_folder()
    engine = VllmFactory(config, folder, LocalLauncher()).create("engine-0")
    try:
        run(engine.start())
        yield engine
    finally:
        run(engine.close())
        shutil.rmtree(folder)


def call(run: Run, engine: VllmEngine, method: str, *arguments: str) -> dict:
    return run(engine._workers("load", f"megatron_rl_{method}", *arguments))[0]


def put(run: Run, engine: VllmEngine, model: Path, version: int) -> list[float]:
    with in_shared_memory(model, version) as weights:
        return run(publish(engine, weights))


def load(run: Run, engine: VllmEngine, model: Path) -> WeightReport:
    async def attempt(weights) -> WeightReport:
        await engine.pause()
        return await engine.load(weights)

    with in_shared_memory(model, 17) as weights:
        return run(attempt(weights))


def test_after_a_copy_in_place_every_greedy_token_is_that_of_the_new_weights(run, copying, models):
    assert call(run, copying, "learn_order")["obstacles"] == []
    before = call(run, copying, "count_reloads")
    asked = [request(number, temperature=0.0, max_tokens=NUM_TOKENS) for number in range(8)]
    for version, model in enumerate((models.second, models.first, models.second)):
        put(run, copying, model, version)

        async def generate() -> list:
            return [await copying.generate(one) for one in asked]

        reference = Reference(model)
        counts = [reference.num_greedy(one, group[0]) for one, group in zip(asked, run(generate()), strict=True)]
        assert sum(counts) == len(asked) * NUM_TOKENS
    report = load(run, copying, models.first)
    assert report.num_compared == report.num_parameters > 0
    # vLLM itself loaded nothing.
    assert call(run, copying, "count_reloads") == before


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
