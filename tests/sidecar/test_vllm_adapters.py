"""A real vLLM that holds a base and gets adapters: it samples from both, proves both, and nothing else is taken."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_rl.shared.protocol import probe
from megatron_rl.sidecar.engines import EngineLost, EngineRefused, EngineState, WrongWeights
from megatron_rl.sidecar.vllm.answers import build_call
from megatron_rl.sidecar.vllm.engine import VllmEngine
from megatron_rl.sidecar.vllm.routes import AdaptersName
from tests import hf_models
from tests.sidecar import adapter_folders
from tests.sidecar.vllm_models import Models, Reference, Run, configure, generate, load, publish, request, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=[1, 2], ids=["TP1", "TP2"])
def adapted(run: Run, models: Models, request: pytest.FixtureRequest) -> Iterator[VllmEngine]:
    config = configure(
        models.first, "tests.sidecar.worker_extensions.OtherFactors",
        lora_rank=adapter_folders.RANK, tensor_parallel_size=request.param,
    )  # fmt: skip
    with started(run, config, f"adapted-{request.param}") as engine:
        yield engine


def put(run: Run, engine: VllmEngine, models: Models, seed: int, version: int) -> None:
    """Publish the adapters of a seed."""
    factors = adapter_folders.draw_factors(models.first, seed)
    with adapter_folders.published(models.first, factors, version) as weights:
        run(publish(engine, weights))


def test_log_probs_are_those_of_merged_weights_in_every_version(
    run: Run, adapted: VllmEngine, models: Models, tmp_path: Path
) -> None:
    assert adapted.facts["products_patch"] == "applied"
    requests = [request(number, 4, temperature=1.0, max_tokens=24) for number in range(6)]
    for version in range(2):
        factors = adapter_folders.draw_factors(models.first, version)
        with adapter_folders.published(models.first, factors, version) as weights:
            run(publish(adapted, weights))
        groups = generate(run, adapted, *requests)
        pairs = [(req, response) for req, group in zip(requests, groups, strict=True) for response in group]
        assert {response.fingerprint for _, response in pairs} == {weights.fingerprint}
        assert {span.version for _, response in pairs for span in response.spans} == {str(version)}
        merged = adapter_folders.merge(models.first, factors, tmp_path / str(version))
        assert Reference(merged).error_over_bound(pairs) <= 1
        assert Reference(models.first).error_over_bound(pairs) > 1000


def test_all_factors_and_all_of_the_base_are_compared(run: Run, adapted: VllmEngine, models: Models) -> None:
    factors = adapter_folders.draw_factors(models.first, 0)
    for version in (2, 3):
        with adapter_folders.published(models.first, factors, version) as weights:
            report = load(run, adapted, weights)
        assert report.num_compared == report.num_parameters > len(factors)
        assert report.fingerprint == weights.fingerprint


@pytest.mark.parametrize("fault", ["stale", "one number"])
def test_a_slot_that_holds_other_adapters_is_proved_wrong(
    run: Run, adapted: VllmEngine, models: Models, fault: str
) -> None:
    put(run, adapted, models, 0, 4)
    run(adapted._workers("plan", "megatron_rl_change_adapters", fault))
    if fault == "stale":
        put(run, adapted, models, 0, 5)
    with pytest.raises(WrongWeights, match="do not hold the numbers that were given"):
        put(run, adapted, models, 1, 6)
    assert adapted.state is EngineState.DIRTY
    run(adapted._workers("plan", "megatron_rl_change_adapters", ""))
    put(run, adapted, models, 1, 6)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_the_probe_finds_an_engine_that_scales_adapters(
    run: Run, adapted: VllmEngine, models: Models, tmp_path: Path, factor: float
) -> None:
    """Let the slot hold the right numbers, and the engine compute with others."""
    factors = adapter_folders.draw_factors(models.first, 1)
    merged = adapter_folders.merge(models.first, factors, tmp_path / "merged")
    asked = probe.draw_tokens(6, hf_models.VOCAB_SIZE, probe.LEAST_TOKENS)
    (expected,) = hf_models.log_probs(merged, [asked])

    def measure() -> float:
        put(run, adapted, models, 1, 6)
        return probe.measure_difference(run(adapted.probe(asked)).log_probs, expected.tolist()).mean

    bound = probe.limit_by_spread(probe.find_bound(adapted.kind, "float32"), adapted.kind, expected.tolist())
    assert measure() < bound / 20
    run(adapted._workers("plan", "megatron_rl_scale_adapters", str(factor)))
    assert measure() > 20 * bound
    run(adapted._workers("plan", "megatron_rl_scale_adapters", "1"))
    assert measure() < bound / 20


def test_a_base_of_another_fingerprint_is_refused(run: Run, adapted: VllmEngine, models: Models) -> None:
    factors = adapter_folders.draw_factors(models.second, 0)
    with (
        adapter_folders.published(models.second, factors, 7) as weights,
        pytest.raises(EngineRefused, match="start engines from the trainer's --hf-model"),
    ):
        run(publish(adapted, weights))


@pytest.mark.parametrize("named", [None, AdaptersName("8:of-before", 9)], ids=["the base", "an old version"])
def test_a_request_that_names_others_is_refused(
    run: Run, adapted: VllmEngine, models: Models, named: AdaptersName | None
) -> None:
    put(run, adapted, models, 1, 9)
    call = build_call(request(0), adapted.limits, adapted._tag, named)
    with pytest.raises(EngineRefused, match=f"the request names {named.name if named else 'no adapters'}"):
        run(adapted._ask("generate", call))


def test_an_answer_that_others_sampled_is_refused(
    run: Run, adapted: VllmEngine, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(run, adapted, models, 1, 10)
    ask = adapted._ask

    async def answer_of_base(step: str, call: Any) -> Any:
        return msgspec.structs.replace(await ask(step, call), adapters="")

    monkeypatch.setattr(adapted, "_ask", answer_of_base)
    with pytest.raises(EngineRefused, match="was sampled with no adapters"):
        generate(run, adapted, request(0))


def test_a_step_of_the_base_ends_the_engine(run: Run, adapted: VllmEngine, models: Models) -> None:
    """Ask by a route of vLLM's own; the engine samples nothing after it, so this test is the last one."""
    put(run, adapted, models, 1, 11)
    with contextlib.suppress(EngineRefused, EngineLost):
        run(
            adapted._connection.post(
                "bypass", "/v1/completions", {"model": "policy", "prompt": [3, 4], "max_tokens": 2}
            )
        )
    with pytest.raises((EngineLost, EngineRefused)):
        generate(run, adapted, request(0))
    assert "OtherAdapters" in adapted.last_words()
