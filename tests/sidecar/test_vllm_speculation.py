"""A real vLLM that drafts tokens in every way: it samples from the policy all the same, and proves what it holds."""

import dataclasses
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.shared.protocol.wire import Drafts, decode_tokens
from megatron_rl.sidecar.engines import GroupRequest
from megatron_rl.sidecar.vllm.engine import VllmEngine
from megatron_rl.sidecar.vllm.speculation import describe_for_vllm, find_draft_problems
from tests.sidecar import vllm_models
from tests.sidecar.draft_models import add_prediction_layer, draw_eagle3
from tests.sidecar.exact_samples import NUM_TOKENS, compute_probabilities, find_deviation
from tests.sidecar.vllm_models import Models, Reference, Run, generate, in_shared_memory, publish, request, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
VOCAB_SIZE = 12
# So few tokens that each pair of them is sampled often.
_PROBE = tuple(n % VOCAB_SIZE for n in range(32))
_GROUP_SIZE, _NUM_GROUPS = 128, 24
_MOST_DEVIATION = 5.0
_METHODS = ("ngram", "suffix", "draft", "eagle3", "mtp")


@dataclasses.dataclass(frozen=True)
class Drafting:
    """An engine that drafts, and two sets of weights of its policy."""

    method: str
    engine: VllmEngine
    models: Models


@pytest.fixture(scope="module", params=_METHODS)
def drafting(run: Run, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Drafting]:
    method, folder = request.param, tmp_path_factory.mktemp(request.param)
    if method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        pytest.skip("arctic-inference has an environment of its own: make test-suffix")
    models = vllm_models.draw("glm4_moe" if method == "mtp" else "qwen3", folder, vocab_size=VOCAB_SIZE, head_dim=32)
    start = models.first
    if method == "mtp":
        start = add_prediction_layer(
            vllm_models.copy(models.first, "predicting"), vllm_models.SIZES["num_hidden_layers"]
        )
    # The weights of version 0 draft for every version: perfect drafts, and stale ones.
    folders = {"draft": models.first, "eagle3": draw_eagle3(folder / "head", VOCAB_SIZE)}
    rollout = RolloutConfig(speculative=f"{method}:{folders[method]}" if method in folders else method)
    assert not list(find_draft_problems(rollout, start))
    config = vllm_models.configure(
        start,
        "tests.sidecar.worker_extensions.DraftReader",
        max_num_seqs=_GROUP_SIZE,
        speculation=describe_for_vllm(rollout),
        # Prompts of some hundreds are split, and short ones are sampled many at a time.
        flags=("--max-num-batched-tokens", "640"),
    )
    with started(run, config, method) as engine:
        yield Drafting(method, engine, models)


def ask(number: int, group_size: int, length: int, **sampling: Any) -> GroupRequest:
    one = request(number, group_size, length, ignore_eos=True, **sampling)
    return dataclasses.replace(one, prompt_tokens=tuple(token % VOCAB_SIZE for token in one.prompt_tokens))


def count(run: Run, engine: VllmEngine) -> Drafts:
    found = run(engine.count_drafts())
    assert found is not None
    return found


def read_draft(run: Run, engine: VllmEngine) -> dict[str, dict[str, list[int]]]:
    (answer,) = run(engine._workers("draft", "megatron_rl_digest_draft"))
    return answer


def must_draft_earlier_responses(run: Run, engine: VllmEngine, kept: list[list[int]]) -> None:
    """Check that suffixes of responses that earlier versions gave are still continued as they were."""
    for tokens in kept:
        middle = len(tokens) // 2
        (answer,) = run(engine._workers("draft", "megatron_rl_draft_after", json.dumps(tokens[:middle])))
        print(f"{len(answer['tokens'])} tokens of an earlier version's response were drafted")
        assert answer["tokens"] == tokens[middle:][: len(answer["tokens"])] != []


def must_have_exact_probabilities(run: Run, engine: VllmEngine, model: Path, temperature: float) -> None:
    one = ask(0, _GROUP_SIZE, 9, temperature=temperature, max_tokens=NUM_TOKENS)
    requests = [
        dataclasses.replace(one, request_id=f"{temperature}-{number}", seed=10_000 * number)
        for number in range(_NUM_GROUPS)
    ]
    before = count(run, engine)
    groups = generate(run, engine, *requests)
    since = count(run, engine) - before
    responses = [decode_tokens(response.tokens).tolist() for group in groups for response in group]
    exact = compute_probabilities(model, one.prompt_tokens, VOCAB_SIZE, temperature)
    deviation = find_deviation(responses, exact)
    print(f"temperature {temperature}: {len(responses)} responses, deviation {deviation:.1f}, {since}")
    assert since.accepted > 20
    assert deviation < _MOST_DEVIATION


def sample_long(run: Run, engine: VllmEngine, version: int) -> list[int]:
    """Sample a response that is too long to be like another one."""
    one = dataclasses.replace(ask(50 + version, 1, 40, temperature=1.4, max_tokens=64), request_id=f"long-{version}")
    [[response]] = generate(run, engine, one)
    return decode_tokens(response.tokens).tolist()


def must_have_log_probs(run: Run, engine: VllmEngine, model: Path, version: int) -> float:
    """Check log-probs and greedy tokens; return the share of greedy drafts that were accepted."""
    reference = Reference(model)
    requests = [ask(n, 2, 300, temperature=(0.6, 1.3)[n % 2], max_tokens=24) for n in range(4)]
    groups = generate(run, engine, *requests)
    pairs = [(one, response) for one, group in zip(requests, groups, strict=True) for response in group]
    assert {span.version for _, response in pairs for span in response.spans} == {str(version)}
    assert reference.error_over_bound(pairs) <= 1
    before = count(run, engine)
    greedy = [ask(number, 1, 300, temperature=0.0, max_tokens=24) for number in range(3)]
    for one, (response,) in zip(greedy, generate(run, engine, *greedy), strict=True):
        assert reference.num_greedy(one, response) == len(decode_tokens(response.tokens)) == 24
    since = count(run, engine) - before
    assert since.drafted > 0
    return since.accepted / since.drafted


def test_samples_and_log_probs_are_the_policys_whatever_is_drafted(
    run: Run, drafting: Drafting, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    engine, models = drafting.engine, drafting.models
    assert engine.facts["draft_patch"] == "applied"
    loaded, shares, seen = read_draft(run, engine), [], []
    kept: list[list[int]] = []
    assert bool(loaded["own"]) == (drafting.method in ("draft", "eagle3", "mtp"))
    for version, model in enumerate((models.first, models.second, models.first)):
        with in_shared_memory(model, version) as weights:
            run(publish(engine, weights, _PROBE))
        now = read_draft(run, engine)
        # A publish leaves the draft as it was loaded, but for what it shares with the policy.
        assert now["own"] == loaded["own"]
        seen.append(now["shared"])
        assert count(run, engine).drafted == 0
        # Right after a publish, drafts by suffixes are what the version before would have said.
        must_draft_earlier_responses(run, engine, kept)
        if version < 2:
            must_have_exact_probabilities(run, engine, model, temperature=(0.7, 1.4)[version])
        shares.append(must_have_log_probs(run, engine, model, version))
        if drafting.method == "suffix":
            kept.append(sample_long(run, engine, version))
    print(f"{drafting.method}: shares of accepted greedy drafts: {shares}")
    assert "drafted tokens were accepted" in caplog.text
    if drafting.method == "draft":
        # A stale draft changes the speed, and is perfect again once the policy has the draft's weights.
        assert min(shares[0], shares[2]) > 0.9 > 0.5 > shares[1]
    if drafting.method in ("eagle3", "mtp"):
        assert seen[0].keys() & {"model.embed_tokens.weight"}
        assert seen[0] == seen[2] != seen[1]
    else:
        assert not seen[0]
