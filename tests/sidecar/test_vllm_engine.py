"""One real vLLM server: it samples from the published weights, says so, and refuses weights that it cannot load."""

import asyncio
import contextlib
import dataclasses
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.shared.protocol.wire import decode_log_probs, decode_tokens
from megatron_rl.shared.weights import folders
from megatron_rl.shared.weights.folders import Counter
from megatron_rl.sidecar.engines import (
    EngineLost,
    EngineRefused,
    EngineState,
    WeightReport,
    WeightsNotWritten,
    WrongWeights,
)
from megatron_rl.sidecar.vllm.answers import build_call
from megatron_rl.sidecar.vllm.engine import Deadlines, VllmEngine
from megatron_rl.sidecar.vllm.received import list_specs, map_file_tensors
from megatron_rl.sidecar.vllm.routes import COMMIT, Committed
from tests.sidecar.vllm_models import (
    VOCAB_SIZE,
    Reference,
    Run,
    generate,
    in_shared_memory,
    load,
    publish,
    put,
    request,
)

NUM_PROMPTS, NUM_TOKENS = 24, 16
_GENERATED = "vllm:generation_tokens_total"


async def read_metric(engine: VllmEngine, name: str) -> float:
    transport = httpx.AsyncHTTPTransport(uds=engine.address)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


def test_after_a_publish_every_greedy_token_is_that_of_the_new_weights(run, engine, models):
    requests = [request(number, temperature=0.0, max_tokens=NUM_TOKENS) for number in range(NUM_PROMPTS)]
    continuations = {}
    for version, model in enumerate((models.first, models.second)):
        put(run, engine, model, version)
        groups = generate(run, engine, *requests)
        reference = Reference(model)
        counts = [reference.num_greedy(req, group[0]) for req, group in zip(requests, groups, strict=True)]
        assert sum(counts) == NUM_PROMPTS * NUM_TOKENS
        continuations[version] = [group[0].tokens for group in groups]
    different = sum(old != new for old, new in zip(*continuations.values(), strict=True))
    assert different >= 0.9 * NUM_PROMPTS


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_log_probs_are_those_of_logits_over_temperature(run, engine, models, temperature):
    put(run, engine, models.second, 2)
    reference = Reference(models.second)
    requests = [request(number, 4, temperature=temperature, max_tokens=24) for number in range(6)]
    groups = generate(run, engine, *requests)
    pairs = [(req, response) for req, group in zip(requests, groups, strict=True) for response in group]
    assert reference.error_over_bound(pairs) <= 1


def test_a_response_says_where_it_comes_from(run, engine, models):
    with in_shared_memory(models.first, 7) as weights:
        run(publish(engine, weights))
    (group,) = generate(run, engine, request(1, 3))
    for sample, response in enumerate(group):
        assert response.seed == request(1).seed + sample
        assert (response.engine, response.fingerprint) == (engine.name, weights.fingerprint)
        assert [(span.version, span.start, span.end) for span in response.spans] == [("7", 0, 16)]
        assert len(decode_log_probs(response.log_probs)) == len(decode_tokens(response.tokens)) == 16


def test_a_group_sampled_again_is_the_same_alone_or_among_others(run, engine, models):
    put(run, engine, models.first, 8)
    (alone,) = generate(run, engine, request(3, 4))
    among = generate(run, engine, *(request(number, 4) for number in range(8)))[3]
    assert [response.tokens for response in alone] == [response.tokens for response in among]


def test_a_long_prompt_with_a_seed_is_split_and_sampled(run, engine, models):
    assert engine.facts["seed_patch"].startswith("applied")
    assert engine.facts["scoring_patch"] == "not needed: not a GPU"
    put(run, engine, models.first, 9)
    requests = [request(number, 2, length=400, temperature=1.0) for number in range(4)]
    groups = generate(run, engine, *requests)
    reference = Reference(models.first)
    assert reference.error_over_bound((requests[i], response) for i in range(4) for response in groups[i]) <= 1


def test_stop_tokens_end_a_response_and_are_part_of_it(run, engine, models):
    put(run, engine, models.first, 10)
    stops = list(range(0, VOCAB_SIZE, 8))
    (group,) = generate(run, engine, request(5, 16, temperature=1.5, stop_token_ids=stops))
    reasons = {response.finish_reason for response in group}
    assert "stop" in reasons
    for response in group:
        tokens = decode_tokens(response.tokens).tolist()
        assert (tokens[-1] in stops) == (response.finish_reason == "stop")
        assert not set(tokens[:-1]) & set(stops)


def test_a_cancelled_group_is_aborted_in_the_engine(run, engine, models):
    put(run, engine, models.first, 11)

    async def until(condition) -> None:
        async with asyncio.timeout(60):
            while not condition(
                await read_metric(engine, "vllm:num_requests_running"), await read_metric(engine, _GENERATED)
            ):
                await asyncio.sleep(0.02)

    async def cancel() -> float:
        before = await read_metric(engine, _GENERATED)
        # More than it can finish before the cancellation is seen, however busy the machine.
        groups = (engine.generate(request(6 + number, 64, max_tokens=500, ignore_eos=True)) for number in range(4))
        tasks = [asyncio.create_task(group) for group in groups]
        await until(lambda running, generated: generated > before)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda running, generated: running == 0)
        return await read_metric(engine, _GENERATED) - before

    assert run(cancel()) < 4 * 64 * 500


def test_a_group_that_is_cut_ends_where_it_is_and_others_continue(run, engine, models):
    put(run, engine, models.first, 13)
    whole = request(20, 8, max_tokens=500, ignore_eos=True)
    (expected,) = generate(run, engine, whole)

    async def cut() -> tuple[list, list]:
        event = asyncio.Event()
        tasks = [
            asyncio.create_task(engine.generate(one))
            for one in (dataclasses.replace(whole, cut=event), request(21, 4, max_tokens=300, ignore_eos=True))
        ]
        before = await read_metric(engine, _GENERATED)
        while await read_metric(engine, _GENERATED) == before and not any(task.done() for task in tasks):
            await asyncio.sleep(0.005)
        event.set()
        return await tasks[0], await tasks[1]

    num_cut = 0
    # The machine decides how far they come until they are cut: wait until some are in the middle.
    for _ in range(20):
        group, other = run(cut())
        for response, of_whole in zip(group, expected, strict=True):
            length = len(response.tokens)
            assert response.finish_reason == ("cut" if length < len(of_whole.tokens) else "length")
            assert response.tokens == of_whole.tokens[:length]
            assert len(response.log_probs) == length
            spans = [("13", 0, length // 4)] if length else []
            assert [(span.version, span.start, span.end) for span in response.spans] == spans
            num_cut += 0 < length < len(of_whole.tokens)
        assert {(response.finish_reason, len(response.tokens) // 4) for response in other} == {("length", 300)}
        sampled = [response for response in group if response.tokens]
        assert Reference(models.first).error_over_bound((whole, response) for response in sampled) <= 1
        if num_cut:
            return
    raise AssertionError("no response was cut in its middle in 20 attempts")


def test_a_published_engine_probes_the_same_for_the_same_weights_only(run, engine, models):
    first, second, again = (put(run, engine, model, 12) for model in (models.first, models.second, models.first))
    assert first == again
    assert first != second


def test_a_publish_asks_an_engine_four_things(run, engine, models, monkeypatch):
    asked = []
    send = httpx.AsyncClient.send

    async def counted(self, request, **keywords):
        # On a busy machine the connection looks in between whether the server takes requests.
        asked.extend({request.url.path} - {"/health"})
        return await send(self, request, **keywords)

    monkeypatch.setattr(httpx.AsyncClient, "send", counted)
    put(run, engine, models.first, 12)
    assert sorted(asked) == [
        "/megatron_rl/commit", "/megatron_rl/generate", "/megatron_rl/pause", "/megatron_rl/workers",
    ]  # fmt: skip


def test_a_prefix_of_old_weights_is_never_used_while_a_salt_or_a_reset_guards_it(run, engine, models, monkeypatch):
    """Plant a stale prefix: what was cached stays, and has the salt of every version; each guard alone must do."""
    send = engine._connection.send

    async def keep_cache(step: str, route: str, content: object = None) -> bytes:
        if route != COMMIT:
            return await send(step, route, content)
        # vLLM's own route names the weights and does nothing else.
        await send(step, "/update_weight_version", {"new_version": content.tag})
        fingerprint = content.tag.partition(":")[2]
        return msgspec.msgpack.encode(Committed(content.tag, [{"fingerprint": fingerprint}], is_reset=True))

    def build_without_version(asked, limits, tag, *adapters):
        return build_call(asked, limits, tag if tag.startswith("probe") else "any version", *adapters)

    # Longer than a block of the cache, which has 128 tokens on a CPU.
    asked = request(31, temperature=0.0, max_tokens=NUM_TOKENS, length=400)

    def num_greedy(has_reset: bool, has_salt: bool) -> int:
        """Count the new weights' tokens in a response whose prompt's prefix was cached with old weights."""
        with monkeypatch.context() as patch:
            if not has_salt:
                patch.setattr("megatron_rl.sidecar.vllm.engine.build_call", build_without_version)
            put(run, engine, models.first, 30)
            generate(run, engine, asked)
            if not has_reset:
                patch.setattr(engine._connection, "send", keep_cache)
            put(run, engine, models.second, 31)
            hits = run(read_metric(engine, "vllm:prefix_cache_hits_total"))
            ((response,),) = generate(run, engine, asked)
            is_hit = run(read_metric(engine, "vllm:prefix_cache_hits_total")) > hits
        assert is_hit == (not has_reset and not has_salt)
        return Reference(models.second).num_greedy(asked, response)

    for guards in ((True, True), (True, False), (False, True)):
        assert num_greedy(*guards) == NUM_TOKENS, guards
    # Without both, the same response betrays the old weights.
    assert num_greedy(False, False) < NUM_TOKENS
    put(run, engine, models.first, 32)


class Writing:
    """A trainer that writes the tensors of a folder, in this process, while an engine loads them."""

    def __init__(self, folder: Path) -> None:
        self._tensors = map_file_tensors(folder)
        self._given = {name: tensor.clone() for name, tensor in self._tensors.items()}
        self.names = list(self._tensors)
        self.folder = folder
        for tensor in self._tensors.values():
            tensor.fill_(torch.nan)

    @contextlib.contextmanager
    def begun(self) -> Iterator[Counter]:
        specs = list_specs(self._tensors)
        with folders.writing(self.folder, len(specs), 1), Counter(self.folder, specs, 0, 1) as counter:
            yield counter

    def write(self, name: str, counter: Counter) -> None:
        self._tensors[name].copy_(self._given[name])
        counter.add(name, self._given[name].numel())


def test_weights_are_loaded_while_they_are_written(run, engine, models):
    expected = put(run, engine, models.second, 13)
    put(run, engine, models.first, 13)

    async def publish_slowly(weights) -> list[float]:
        writing = Writing(Path(weights.folder))
        with writing.begun() as counter:
            published = asyncio.create_task(publish(engine, weights))
            for name in writing.names:
                await asyncio.sleep(0.02)
                assert not published.done()
                writing.write(name, counter)
        return await published

    with in_shared_memory(models.second, 13) as weights:
        assert run(publish_slowly(weights)) == expected


@pytest.mark.parametrize("num_written", [0, 7])
def test_a_trainer_that_ends_while_it_writes_leaves_an_engine_that_takes_the_next_weights(
    run, engine, models, num_written
):
    expected = put(run, engine, models.first, 13)

    async def until_it_reads(folder: Path) -> None:
        server = psutil.Process(engine._handle.pid)
        async with asyncio.timeout(60):
            while not any(
                Path(file.path) == folder / "arrived"
                for process in server.children(recursive=True)
                for file in process.open_files()
            ):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)

    async def publish_half(weights) -> None:
        writing = Writing(Path(weights.folder))
        with writing.begun() as counter:
            await engine.pause()
            loaded = asyncio.create_task(engine.load(weights))
            for name in writing.names[:num_written]:
                writing.write(name, counter)
            await until_it_reads(writing.folder)
            assert not loaded.done()
        left = len(writing.names) - num_written
        with pytest.raises(WeightsNotWritten, match=f"ended before it had written {left} tensors: "):
            await loaded
        # No trainer writes any more, which is seen before a weight is touched.
        with pytest.raises(WeightsNotWritten, match="lacks weights, and no trainer is writing them"):
            await engine.load(weights)

    with in_shared_memory(models.second, 14) as weights:
        run(publish_half(weights))
    with pytest.raises(EngineRefused, match="takes no groups"):
        generate(run, engine, request())
    assert put(run, engine, models.first, 15) == expected


def edited(folder: Path, change) -> Path:
    """Copy a model's weights into a folder in shared memory's place, with a change to its tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    copy = Path(shutil.copytree(folder, folder.parent / "edited", dirs_exist_ok=True))
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def refusal(run: Run, engine: VllmEngine, weights) -> str:
    with pytest.raises(EngineRefused) as caught:
        load(run, engine, weights)
    assert engine.state is EngineState.DIRTY
    return str(caught.value)


def test_weights_that_differ_from_the_announced_ones_are_not_loaded(run, engine, models):
    before = put(run, engine, models.first, 13)
    one_bit = edited(models.second, lambda tensors: tensors["model.norm.weight"].view(-1)[3:4].mul_(1.0000001))
    with in_shared_memory(models.second, 14) as announced, in_shared_memory(one_bit, 14) as other:
        wrong = refusal(run, engine, msgspec.structs.replace(announced, source=other.source))
    assert "engine-0, worker 0, load" in wrong
    assert announced.fingerprint in wrong
    with pytest.raises(EngineRefused, match="takes no groups"):
        # The tag and the weights are as before, but no process may believe the tag.
        generate(run, engine, request())
    assert put(run, engine, models.first, 14) == before


def test_an_engine_that_keeps_any_one_tensor_says_so(run, engine, models):
    """Make vLLM load an old tensor in place of a new one, while it believes that it has loaded what it was given."""
    names = list(load_file(models.first / "model.safetensors"))

    def load_model(model: Path) -> WeightReport:
        with in_shared_memory(model, 17) as weights:
            return load(run, engine, weights)

    def keep(text: str) -> None:
        run(engine._workers("load", "megatron_rl_load_otherwise", text))

    def change(tensors) -> None:
        # One step of one weight, of a layer that packs its weights away on a CPU.
        tensors["model.layers.1.mlp.up_proj.weight"].view(torch.int32)[3, 5] += 1

    keep("")
    report = load_model(models.first)
    assert report.num_compared == report.num_parameters > 0
    for name in names:
        keep(name)
        with pytest.raises(WrongWeights, match=f"engine-0, worker 0, load: 1 tensors do not hold .*: {name}$"):
            load_model(models.second)
        keep("")
        load_model(models.first)
    keep("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(WrongWeights, match="up_proj"):
        load_model(edited(models.first, change))
    keep("")
    put(run, engine, models.first, 17)


def test_the_engine_listens_in_a_private_folder_and_nowhere_else(engine):
    sockets = Path(engine.address).parents[1]
    assert stat.S_IMODE(os.stat(engine.address).st_mode) & 0o077 == 0
    assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
    process = psutil.Process(engine._handle.pid)
    for member in (process, *process.children(recursive=True)):
        assert not [c for c in member.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
        paths = [c.laddr for c in member.net_connections(kind="unix") if c.laddr]
        assert all(Path(path).is_relative_to(sockets) for path in paths)


def test_the_groups_of_an_engine_share_one_thread_of_gloo(engine):
    core = next(one for one in psutil.Process(engine._handle.pid).children() if one.name().startswith("VLLM::"))
    names = [path.read_text().strip() for path in Path(f"/proc/{core.pid}/task").glob("*/comm")]
    assert names.count("gloo_tcp_loop") == 1, names


def test_an_engine_that_a_user_started_is_taken_in_and_left_running_at_the_end(run, engine, models):
    adopted = VllmEngine("adopted", engine.address)
    run(adopted.start())
    assert adopted.state is EngineState.WAITING
    assert adopted.facts["seed_patch"] == "applied before"
    put(run, adopted, models.second, 20)
    (group,) = generate(run, adopted, request(1))
    assert group[0].engine == "adopted"
    run(adopted.close())
    assert run(engine.find_fault()) is None


def test_an_engine_that_never_answers_is_given_up_after_its_time_to_start(run, tmp_path):
    engine = VllmEngine("engine-9", str(tmp_path / "nobody.sock"), deadlines=Deadlines(start=0.3))
    with pytest.raises(EngineLost, match="engine-9 was not ready after 0.3 s"):
        run(engine.start())
    run(engine.close())
