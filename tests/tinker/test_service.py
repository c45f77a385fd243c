"""A service with real vLLM, by the client of Tinker's own SDK."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import numpy as np
import pytest
import transformers

from megatron_rl.config.rollout import RewardConfig, RolloutConfig
from megatron_rl.config.serve import ServeConfig
from megatron_rl.errors import InputError
from megatron_rl.sidecar.settings import SidecarSettings
from megatron_rl.tinker import ADDRESS_FILE
from megatron_rl.tinker.front import Front, Model, Served
from megatron_rl.tinker.futures import ModelLine
from megatron_rl.tinker.provenance import SequenceRecord
from megatron_rl.tinker.ranks import Ranks
from megatron_rl.tinker.routes import open_front
from tests.tinker import model
from tests.tinker.services import KEYS, Service, serving
from tests.unit.test_remote_host import make_certificate

tinker = pytest.importorskip("tinker", reason="Tinker's SDK has an environment of its own: make test-tinker")
from tinker import types  # noqa: E402
from tinker.proto import tinker_public_pb2 as messages  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
RANK = 8
PROMPT = [10, 11, 12, 13, 14, 15]
ADAM = types.AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    model.save(folder / model.NAME)
    with serving(folder, "--seq-length", "1024", "--lora-rank", str(RANK), "--serve-most-models", "64") as service:
        yield service


@pytest.fixture
def client(service: Service) -> Any:
    return service.connect()


def begin(client: Any, seed: int = 1) -> Any:
    return client.create_lora_training_client(base_model=model.NAME, rank=RANK, seed=seed).result()


def make_datum(tokens: Sequence[int], targets: Sequence[int], **inputs: Sequence[float]) -> Any:
    values = {"target_tokens": [*targets], **{name: [*one] for name, one in inputs.items()}}
    return types.Datum(model_input=types.ModelInput.from_ints([*tokens]), loss_fn_inputs=values)


def draw_chats(seed: int, count: int = 6) -> list[Any]:
    draw = np.random.default_rng(seed)
    chats = [[*PROMPT, *draw.integers(0, 250, 3 + number).tolist()] for number in range(count)]
    return [make_datum(one[:-1], one[1:], weights=[0.0] * 5 + [1.0] * (len(one) - 6)) for one in chats]


def read(result: Any) -> list[bytes]:
    return [np.asarray(one["logprobs"].data, "<f4").tobytes() for one in result.loss_fn_outputs]


def sample(sampler: Any, count: int = 2, seed: int = 5, **params: Any) -> Any:
    wanted = types.SamplingParams(max_tokens=8, seed=seed, **params)
    return sampler.sample(prompt=types.ModelInput.from_ints(PROMPT), num_samples=count, sampling_params=wanted).result()


def test_a_model_learns_and_its_samplers_keep_its_weights(client) -> None:
    training = begin(client)
    assert training.get_info().model_data.model_name == model.NAME
    data = draw_chats(0)
    first = training.save_weights_and_get_sampling_client().result()
    before = sample(first)
    losses = []
    for _ in range(6):
        # Both are sent before either is answered.
        passed, stepped = training.forward_backward(data, "cross_entropy"), training.optim_step(ADAM)
        losses.append(passed.result().metrics["loss:sum"])
        assert stepped.result().metrics["grad_norm:mean"] > 0
    assert losses[-1] < 0.9 * losses[0]
    second = training.save_weights_and_get_sampling_client().result()
    after = sample(second)
    assert [one.logprobs for one in after.sequences] != [one.logprobs for one in before.sequences]
    # The earlier weights are sampled from again, bit for bit.
    again = sample(first)
    assert [(one.tokens, one.logprobs) for one in again.sequences] == [
        (one.tokens, one.logprobs) for one in before.sequences
    ]
    # Engines and trainer agree about what was sampled, and so do log-probs of prompts.
    (whole,) = [[*PROMPT, *after.sequences[0].tokens]]
    scored = second.compute_logprobs(types.ModelInput.from_ints(whole)).result()
    assert scored[0] is None
    np.testing.assert_allclose(scored[len(PROMPT) :], after.sequences[0].logprobs, atol=2e-3)
    passed = training.forward([make_datum(whole[:-1], whole[1:], weights=[0.0] * (len(whole) - 1))], "cross_entropy")
    assert read(passed.result())[0] == np.asarray(scored[1:], "<f4").tobytes()
    base = client.create_sampling_client(base_model=model.NAME).result()
    assert sample(base).sequences[0].tokens == before.sequences[0].tokens


def loop(training: Any, seed: int, pause: Callable[[], None] = lambda: None) -> list[bytes]:
    found = []
    for number in range(4):
        loss = ("cross_entropy", "importance_sampling")[number % 2]
        sampler = training.save_weights_and_get_sampling_client().result()
        pause()
        answered = sample(sampler, seed=seed + number).sequences
        data = draw_chats(seed + number)
        if loss == "importance_sampling":
            data = [make_sampled(one, advantage) for one, advantage in zip(answered, (1.0, -1.0), strict=True)]
        pause()
        passed = training.forward_backward(data, loss)
        pause()
        training.optim_step(ADAM).result()
        found += read(passed.result())
    return found


def make_sampled(sequence: Any, advantage: float) -> Any:
    """Make a datum of a sampled sequence, as the cookbook does, with its provenance."""
    given, tokens = len(PROMPT) - 1, sequence.tokens
    datum = make_datum(
        [*PROMPT, *tokens[:-1]],
        [0] * given + [*tokens],
        logprobs=[0.0] * given + [*sequence.logprobs],
        advantages=[0.0] * given + [advantage] * len(tokens),
    )
    name = sequence.sequence_id
    return datum.with_provenance(
        model_input=[
            types.PromptProvenanceSpan(sequence_id=name, length=len(PROMPT)),
            types.SampledProvenanceSpan(sequence_id=name, length=len(tokens) - 1),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(sequence_id=name, offset=1, length=given),
            types.SampledProvenanceSpan(sequence_id=name, length=len(tokens)),
        ],
    )


def test_256_requests_at_once_are_answered_each_with_its_own(client) -> None:
    training = begin(client)
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt, start = types.ModelInput.from_ints(PROMPT), time.monotonic()
    sampled = [
        sampler.sample(prompt=prompt, num_samples=1, sampling_params=types.SamplingParams(max_tokens=4, seed=seed))
        for seed in range(240)
    ]
    passed = [training.forward(draw_chats(number, 2), "cross_entropy") for number in range(16)]
    answers = [one.result().sequences[0].tokens for one in sampled]
    log_probs = [read(one.result()) for one in passed]
    print(f"256 requests in {time.monotonic() - start:.1f} s")
    # A request that is sampled alone has the same answer.
    for seed in (0, 100, 239):
        alone = types.SamplingParams(max_tokens=4, seed=seed)
        assert (
            sampler.sample(prompt=prompt, num_samples=1, sampling_params=alone).result().sequences[0].tokens
            == (answers[seed])
        )
    assert log_probs[7] == read(training.forward(draw_chats(7, 2), "cross_entropy").result())
    assert len({str(one) for one in log_probs}) == 16


def test_two_clients_at_once_have_the_bits_that_each_has_alone(service) -> None:
    alone = [loop(begin(service.connect(key)), seed) for key, seed in zip(KEYS, (20, 40), strict=True)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        trained = [begin(service.connect(key)) for key in KEYS]
        both = [
            pool.submit(loop, one, seed, lambda: time.sleep(0.05)) for one, seed in zip(trained, (20, 40), strict=True)
        ]
        assert [one.result() for one in both] == alone


def test_a_model_is_saved_and_loaded_with_every_bit(client, service) -> None:
    training = begin(client)
    for seed in (0, 1):
        training.forward_backward(draw_chats(seed), "cross_entropy")
        training.optim_step(ADAM)
    path = training.save_state("two", ttl_seconds=3600).result().path
    other = client.create_training_client_from_state_with_optimizer(path).result()
    fresh = client.create_training_client_from_state(path).result()
    after = []
    for one in (training, other, fresh):
        one.forward_backward(draw_chats(2), "cross_entropy")
        one.optim_step(ADAM)
        after.append(read(one.forward(draw_chats(3), "cross_entropy").result()))
    assert after[0] == after[1] != after[2]
    rest = client.create_rest_client()
    run = training.model_id
    found = rest.list_checkpoints(run).result().checkpoints
    assert [(one.tinker_path, one.checkpoint_type) for one in found] == [(path, "training")]
    assert found[0].expires_at is not None
    named = training.save_weights_for_sampler("one").result().path
    sampler = client.create_sampling_client(model_path=named).result()
    assert sample(sampler).sequences[0].tokens
    with pytest.raises(tinker.NotFoundError):
        service.connect(KEYS[1]).create_rest_client().get_training_run(run).result()
    described = rest.get_training_run(run).result()
    assert (described.last_checkpoint.tinker_path, described.last_sampler_checkpoint.tinker_path) == (path, named)
    assert (described.is_lora, described.lora_rank, described.base_model) == (True, RANK, model.NAME)
    rest.delete_checkpoint(run, "weights/two").result()
    assert [one.tinker_path for one in rest.list_checkpoints(run).result().checkpoints] == [named]


def test_a_request_that_comes_twice_has_one_effect_and_later_ones_wait(service, client) -> None:
    training, twin = begin(client), begin(client)
    data = draw_chats(7)
    expected = []
    for _ in range(2):
        twin.forward_backward(data, "cross_entropy")
        twin.optim_step(ADAM)
    expected = read(twin.forward(data, "cross_entropy").result())

    def step(number: int) -> dict[str, Any]:
        return {"model_id": training.model_id, "seq_id": number, "adam_params": {"learning_rate": 1e-2}}

    def train(number: int, is_forward_only: bool = False) -> bytes:
        from tinker.proto.request_conv import forward_backward_request_to_proto

        request = types.ForwardBackwardRequest(
            forward_backward_input=types.ForwardBackwardInput(data=data, loss_fn="cross_entropy"),
            model_id=training.model_id,
            seq_id=number,
        )
        message = forward_backward_request_to_proto(request)
        message.forward_only = is_forward_only
        return message.SerializeToString()

    # Backwards, and each twice.
    sent = [
        ("optim_step", step(4)),
        ("forward_backward", train(3)),
        ("optim_step", step(2)),
        ("forward_backward", train(1)),
    ]
    names = [service.post(path, body)[1]["request_id"] for path, body in sent]
    assert [service.post(path, body)[1]["request_id"] for path, body in sent] == names
    status, done = service.post("retrieve_future", {"request_id": names[0]})
    assert (status, done["metrics"]["num_steps:max"]) == (200, 2)
    status, last = service.post("forward_backward", train(5, is_forward_only=True))
    answer = httpx.post(
        f"{service.url}/api/v1/retrieve_future", json={"request_id": last["request_id"]}, headers={"X-API-Key": KEYS[0]}
    )
    output = messages.ForwardBackwardOutput.FromString(answer.content)
    assert output.loss_fn_outputs[0].fields["logprobs"].data == b"".join(expected)


def change(spans: Sequence[Any], number: int, **values: Any) -> list[Any]:
    return [dataclasses.replace(one, **values) if index == number else one for index, one in enumerate(spans)]


def test_claims_that_the_record_does_not_bear_out_are_refused(service, client) -> None:
    training, other = begin(client), begin(client)
    sampler = training.save_weights_and_get_sampling_client().result()
    one, two = sample(sampler).sequences
    foreign = sample(other.save_weights_and_get_sampling_client().result()).sequences[0]
    hidden = begin(service.connect(KEYS[1])).save_weights_and_get_sampling_client().result()
    right = make_sampled(one, 1.0)
    assert training.forward_backward([right], "importance_sampling").result().metrics["age:max"] == 0.0
    inputs, targets, values = right.model_input_spans, right.loss_fn_input_spans, right.loss_fn_inputs
    name, length = one.sequence_id, len(one.tokens)

    def moved(field: str, place: int, value: float) -> Any:
        data = [*values[field].data]
        data[place] = value
        return dataclasses.replace(right, loss_fn_inputs={**values, field: data})

    twice = make_datum([*PROMPT, *one.tokens[:2] * 2], [1] * 10, logprobs=[0.0] * 10, advantages=[0.0] * 10)
    again = types.SampledProvenanceSpan(sequence_id=name, length=2)
    of_prompt = types.PromptProvenanceSpan(sequence_id=name, length=length)
    wrong = [
        ("was not sampled here", dataclasses.replace(right, model_input_spans=change(inputs, 0, sequence_id="x:1"))),
        ("tokens are others", moved("target_tokens", 7, (one.tokens[2] + 1) % 250)),
        ("with other log-probs", moved("logprobs", 8, -0.5)),
        ("which has", dataclasses.replace(right, loss_fn_input_spans=change(targets, 1, offset=1))),
        ("name each token once", dataclasses.replace(right, model_input_spans=inputs[:1])),
        ("and not both", dataclasses.replace(right, model_input_spans=[])),
        ("in their order", dataclasses.replace(
            twice, model_input_spans=[inputs[0], again, again], loss_fn_input_spans=targets)),
        # Of another model, another sequence, another key, and as if a sampled token had been given.
        ("is trained", make_sampled(foreign, 1.0)),
        ("tokens are others", dataclasses.replace(
            right, model_input_spans=change(inputs, 1, sequence_id=two.sequence_id))),
        ("was not sampled here", make_sampled(sample(hidden).sequences[0], 1.0)),
        ("which has", dataclasses.replace(right, loss_fn_input_spans=[targets[0], of_prompt])),
    ]  # fmt: skip
    for words, datum in wrong:
        with pytest.raises(tinker.RequestFailedError, match=words):
            training.forward_backward([datum], "importance_sampling").result()
    # A sampled token after other tokens than those that it was sampled after, and an advantage for a prompt.
    shifted = make_datum(
        [*PROMPT[2:], *one.tokens[:-1]],
        [0] * 3 + [*one.tokens],
        logprobs=[0.0] * 3 + [*one.logprobs],
        advantages=[0.0] * 3 + [1.0] * length,
    ).with_provenance(
        model_input=[
            types.PromptProvenanceSpan(sequence_id=name, offset=2, length=4),
            types.SampledProvenanceSpan(sequence_id=name, length=length - 1),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(sequence_id=name, offset=3, length=3),
            types.SampledProvenanceSpan(sequence_id=name, length=length),
        ],
    )
    of_prompt = moved("advantages", 1, 1.0)
    of_prompt = dataclasses.replace(
        of_prompt, loss_fn_inputs={**of_prompt.loss_fn_inputs, "target_tokens": [*PROMPT[1:], *one.tokens]}
    )
    warm = make_sampled(sample(sampler, temperature=0.7).sequences[0], 1.0)
    for words, datum in (
        ("after other tokens", shifted),
        ("belongs to a prompt", of_prompt),
        ("temperature 0.7", warm),
    ):
        with pytest.raises(tinker.RequestFailedError, match=words):
            training.forward_backward([datum], "importance_sampling").result()
    # Nothing of them has been trained on: after a second pass over what was right, a twin has the same bits.
    twin, plain = begin(client), dataclasses.replace(right, model_input_spans=None, loss_fn_input_spans=None)
    for one_model, count in ((training, 1), (twin, 2)):
        for _ in range(count):
            one_model.forward_backward([plain], "importance_sampling")
        one_model.optim_step(ADAM).result()
    of_training, of_twin = (read(m.forward(draw_chats(3), "cross_entropy").result()) for m in (training, twin))
    assert of_training == of_twin
    later = training.forward_backward([right], "importance_sampling").result()
    assert later.metrics["age:max"] == 1.0


def test_a_load_ends_what_came_after_and_a_name_has_its_newest_weights(client) -> None:
    training = begin(client)
    start = training.save_state("start").result().path
    early = sample(training.save_weights_and_get_sampling_client().result()).sequences[0]
    training.forward_backward(draw_chats(0), "cross_entropy")
    training.optim_step(ADAM)
    named = training.save_weights_for_sampler("latest").result().path
    first = sample(client.create_sampling_client(model_path=named).result()).sequences[0]
    late = sample(training.save_weights_and_get_sampling_client().result()).sequences[0]
    training.load_state_with_optimizer(start).result()
    for _ in range(2):
        training.forward_backward(draw_chats(1), "cross_entropy")
        training.optim_step(ADAM)
    assert training.forward_backward([make_sampled(early, 1.0)], "ppo").result().metrics["age:max"] == 2.0
    with pytest.raises(tinker.RequestFailedError, match="undone"):
        training.forward_backward([make_sampled(late, 1.0)], "ppo").result()
    client.create_rest_client().delete_checkpoint(training.model_id, "sampler_weights/latest").result()
    again = training.save_weights_for_sampler("latest").result().path
    assert again == named
    sampler = client.create_sampling_client(model_path=named).result()
    second = sample(sampler).sequences[0]
    assert second.logprobs != first.logprobs
    # Ranks keep eight; the others are read again from their checkpoints.
    for number in range(9):
        training.save_weights_for_sampler(f"later-{number}").result()
    sample(client.create_sampling_client(base_model=model.NAME).result())
    assert sample(sampler).sequences[0].logprobs == second.logprobs


def test_a_text_stops_a_sequence_with_its_last_token(client, service) -> None:
    sampler = begin(client).save_weights_and_get_sampling_client().result()
    free = sample(sampler, count=1, stop=[]).sequences[0]
    assert len(free.tokens) == 8
    words = transformers.AutoTokenizer.from_pretrained(service.models / model.NAME)
    text = words.decode(free.tokens[:4], skip_special_tokens=False)
    cut = sample(sampler, count=1, stop=[text[-1]]).sequences[0]
    assert cut.stop_reason == "stop"
    assert cut.tokens == free.tokens[: len(cut.tokens)]
    assert text[-1] in words.decode(cut.tokens, skip_special_tokens=False)
    assert text[-1] not in words.decode(cut.tokens[:-1], skip_special_tokens=False)


def train_one(client: Any, length: int, target: int) -> Any:
    datum = make_datum([1] * length, [target] * length, weights=[1.0] * length)
    return begin(client).forward_backward([datum], "cross_entropy").result()


@pytest.mark.parametrize(("make", "words"), [
    (lambda c: begin(c).forward_backward(draw_chats(0), "stable_reinforce").result(), "is not served"),
    (lambda c: begin(c).forward_backward(draw_chats(0), "ppo").result(), "has no logprobs"),
    (lambda c: train_one(c, 1, 99999), "vocabulary"),
    (lambda c: train_one(c, 3000, 1), "micro-batch"),
    (lambda c: begin(c, seed=1 << 70), "whole number"),
    (lambda c: begin(c).forward_backward(
        [make_datum([1], [1], weights=[1.0]), types.Datum(model_input=types.ModelInput.from_ints([1]),
         loss_fn_inputs={"target_tokens": np.ones((1, 2), "<i8"), "weights": np.ones((1, 2), "<f4")})], "cross_entropy",
    ).result(), "each kind alone"),
    (lambda c: c.create_lora_training_client(base_model=model.NAME, rank=16).result(), "--lora-rank 16"),
    (lambda c: c.create_lora_training_client(base_model="other/model", rank=RANK).result(), "is not served"),
    (lambda c: sample(c.create_sampling_client(base_model=model.NAME).result(), top_p=0.5), "top_p"),
    (lambda c: c.create_sampling_client(model_path="tinker://a:train:0/sampler_weights/b").result(), "does not exist"),
])  # fmt: skip
def test_what_cannot_be_done_is_said(make, words, client) -> None:
    with pytest.raises(tinker.TinkerError, match=words):
        make(client)


def test_a_body_that_is_not_what_it_says_fails_alone(service, client) -> None:
    training = begin(client)
    request = messages.ForwardBackwardRequest(model_id=training.model_id, seq_id=1, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = b"12345"
    datum.loss_fn_inputs["target_tokens"].CopyFrom(messages.Tensor(dense=b"\0" * 8, dtype=2, shape=[1]))
    future = service.post("forward_backward", request.SerializeToString())[1]
    assert "5 bytes" in service.post("retrieve_future", {"request_id": future["request_id"]})[1]["error"]
    assert service.post("forward_backward", b"\xff\xff")[0] == 400
    assert service.post("asample", {"sampling_session_id": 3})[0] == 400
    assert service.post("create_model", {"session_id": "x", "base_model": model.NAME, "model_seq_id": 0})[0] == 404
    assert train_one(client, 3, 1).metrics["loss:sum"] > 0


def test_at_temperature_0_all_samples_are_the_likeliest_tokens(client) -> None:
    sampler = client.create_sampling_client(base_model=model.NAME)
    answered = sample(sampler, count=3, temperature=0.0).sequences
    # So are the samples of one token to choose from, whatever their seed.
    answered += sample(sampler, count=2, seed=6, top_k=1).sequences
    assert len({tuple(one.tokens) for one in answered}) == 1
    assert len({one.sequence_id for one in answered}) == 5


def test_an_unloaded_model_is_gone_and_its_checkpoints_are_not(service, client) -> None:
    training = begin(client)
    path = training.save_state("before").result().path
    future = service.post("unload_model", {"model_id": training.model_id})[1]["request_id"]
    answer = service.post("retrieve_future", {"request_id": future})[1]
    assert answer == {"type": "unload_model", "model_id": training.model_id}
    with pytest.raises(tinker.APIStatusError, match="does not exist"):
        training.forward(draw_chats(0), "cross_entropy").result()
    again = client.create_training_client_from_state(path).result()
    assert again.forward(draw_chats(0), "cross_entropy").result().metrics["loss:sum"] > 0


def test_targets_without_weights_have_the_weight_1(client) -> None:
    training, tokens = begin(client), [*PROMPT, 20, 21]
    given = make_datum(tokens[:-1], tokens[1:], weights=[1.0] * (len(tokens) - 1))
    plain = make_datum(tokens[:-1], tokens[1:])
    first, second = (training.forward_backward([one], "cross_entropy").result() for one in (given, plain))
    assert first.metrics["loss:sum"] == second.metrics["loss:sum"] > 0


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 2)])
def test_log_probs_have_the_shape_of_their_targets(shape, client) -> None:
    values = {"target_tokens": np.ones(shape, "<i8"), "weights": np.ones(shape, "<f4")}
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=values)
    (output,) = begin(client).forward([datum], "cross_entropy").result().loss_fn_outputs
    assert output["logprobs"].to_numpy().shape == shape


@pytest.mark.skipif(shutil.which("openssl") is None, reason="this host has no openssl to make certificates")
def test_a_client_that_has_the_certificate_connects_and_another_does_not(tmp_path, monkeypatch) -> None:
    cert, key = make_certificate(tmp_path, "service")
    model.save(tmp_path / "model")
    (tmp_path / "keys").write_text(KEYS[0])
    settings = SidecarSettings(
        platform="cpu",
        hf_model=tmp_path / "model",
        seq_length=64,
        rollout=RolloutConfig(folder=tmp_path),
        reward=RewardConfig(),
        serve=ServeConfig(keys_file=tmp_path / "keys", tls_cert=cert, tls_key=key),
    )
    engines: Any = None

    def ask(url: str) -> str:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/api/v1/healthz")
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        asked = tinker.ServiceClient(base_url=url, api_key=KEYS[0]).get_server_capabilities()
        return asked.supported_models[0].model_name

    async def check() -> str:
        async with contextlib.AsyncExitStack() as stack:
            await open_front(settings, engines, lambda _: [], stack)
            url = (tmp_path / ADDRESS_FILE).read_text().strip()
            assert url.startswith("https://127.0.0.1:")
            return await asyncio.to_thread(ask, url)

    assert asyncio.run(check()) == "model"


def test_where_provenance_is_required_nothing_else_is_trained_on(tmp_path) -> None:
    served = Served(
        base_model=model.NAME, folder=tmp_path, longest=64, lora_rank=0, most_models=1, needs_provenance=True,
        decode=lambda _: [], last_version=0,
    )  # fmt: skip
    engines: Any = None
    front = Front(served, Ranks(), engines, SequenceRecord(tmp_path), lambda _: None)
    request = messages.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = b"\1\0\0\0"
    datum.loss_fn_inputs["target_tokens"].CopyFrom(messages.Tensor(dense=b"\2" + bytes(7), dtype=2, shape=[1]))
    trained = Model("m", "s", "key", ModelLine(front.futures, "key"))
    with pytest.raises(InputError, match="names no sequences, and --require-provenance trains on no other data"):
        asyncio.run(front.train(trained, request.SerializeToString()))


def test_keys_are_checked_and_tell_nothing_of_each_others_models(service, client) -> None:
    assert service.post("create_session", {}, key="tml-wrong")[0] == 401
    training = begin(client)
    status, answer = service.post("get_info", {"model_id": training.model_id}, key=KEYS[1])
    assert (status, "does not exist" in answer["error"]) == (404, True)
    logs = b"".join(path.read_bytes() for path in service.folder.rglob("*") if path.is_file())
    assert not any(key.encode() in logs for key in KEYS)


LOOP = ["max_steps=2", "batch_size=2", "group_size=4", "max_tokens=24"]


@pytest.mark.parametrize(("name", "words"), [
    ("rl_loop", [*LOOP, "loss_fn=importance_sampling"]),
    pytest.param("rl_loop", [*LOOP, "loss_fn=gspo"], marks=pytest.mark.slow),
    pytest.param("sl_loop", ["max_steps=3", "batch_size=4", "save_every=2"], marks=pytest.mark.slow),
])  # fmt: skip
def test_a_recipe_of_the_cookbook_runs_as_it_is(name, words, service, tmp_path) -> None:
    service.run_recipe(name, "chats", f"log_path={tmp_path}/log", f"lora_rank={RANK}", *words)
