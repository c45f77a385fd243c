"""Our routes of a vLLM server, with a stand-in for vLLM."""

import asyncio
import dataclasses
import sys
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from prometheus_client import Gauge

from megatron_rl.shared.protocol.wire import Sampling
from megatron_rl.sidecar.engines import (
    EngineBusy,
    EngineRefused,
    EngineState,
    GroupRequest,
    WeightReport,
    WrongWeights,
)
from megatron_rl.sidecar.vllm import routes
from megatron_rl.sidecar.vllm.answers import Limits
from megatron_rl.sidecar.vllm.engine import VllmEngine
from megatron_rl.sidecar.vllm.routes import AdaptersName, Cut, GroupAnswer, GroupCall, GroupChoice, Routes
from megatron_rl.sidecar.vllm.scheduler import SCHEDULER, HoldsOutputs

CALL = msgspec.msgpack.encode(GroupCall("r", b"", {"n": 2}, "3:abc"))
ANSWER = GroupAnswer([])


async def nobody(scope, receive, send):
    await send({"type": "http.response.start", "status": 404, "headers": []})


def ask(
    path: str = routes.GENERATE, body: bytes = CALL, leaves: asyncio.Event | None = None, engine: Any = "the engine"
) -> list[dict]:
    """Return what the route sends; a client that `leaves` is gone once this is set."""
    sent: list[dict] = []
    messages = [
        {"type": "http.request", "body": body[:3], "more_body": True},
        {"type": "http.request", "body": body[3:], "more_body": False},
    ]

    async def receive() -> dict:
        if messages:
            return messages.pop(0)
        await (leaves or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        sent.append(message)

    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    scope = {"type": "http", "method": "POST", "path": path, "app": app}
    asyncio.run(Routes(nobody)(scope, receive, send))
    return sent


def test_a_call_in_parts_reaches_the_engine_and_its_answer_is_one_message(monkeypatch):
    asked = []

    async def sample(client, call):
        asked.append((client, call.sampling))
        return ANSWER

    monkeypatch.setattr(routes, "sample_group", sample)
    start, body = ask()
    assert asked == [("the engine", {"n": 2})]
    assert start["status"] == 200
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
    assert msgspec.msgpack.decode(body["body"], type=GroupAnswer) == ANSWER


def test_a_pause_waits_for_what_is_in_flight_and_for_nothing_else():
    asked = []

    class Core:
        async def pause_scheduler_async(self, **arguments):
            asked.append(arguments)

    start, _ = ask(routes.PAUSE, engine=SimpleNamespace(engine_core=Core()))
    assert start["status"] == 200
    assert asked == [{"mode": "wait", "clear_cache": False}]


def test_a_pause_also_refuses_new_groups_where_vllm_can():
    asked = []

    class Core:
        async def pause_scheduler_async(self, **arguments): ...

        async def pause_generation_async(self, **arguments):
            asked.append(arguments)

    ask(routes.PAUSE, engine=SimpleNamespace(engine_core=Core()))
    assert asked == [{"mode": "wait", "clear_cache": False}]


def test_other_paths_are_for_vllm_to_answer():
    assert ask("/health")[0]["status"] == 404


def test_a_request_that_vllm_refuses_is_answered_with_its_words(monkeypatch):
    async def refuse(client, call):
        raise ValueError("the prompt is too long")

    monkeypatch.setattr(routes, "sample_group", refuse)
    start, body = ask()
    assert (start["status"], body["body"]) == (400, b"ValueError: the prompt is too long")


def test_a_call_that_cannot_be_read_is_refused():
    start, _ = ask(body=b"\xc1 no message")
    assert start["status"] == 400


def test_an_engine_that_fails_is_an_error_of_the_server(monkeypatch):
    async def fail(client, call):
        raise RuntimeError("the engine is dead")

    monkeypatch.setattr(routes, "sample_group", fail)
    assert ask()[0]["status"] == 500


class RetryableRequestError(Exception):
    """An error as vLLM 0.33 raises it while it is paused."""

    status_code = HTTPStatus.SERVICE_UNAVAILABLE


def test_a_group_that_a_paused_engine_refuses_may_be_sent_again(monkeypatch):
    async def refuse(client, call):
        raise RetryableRequestError("Generation is paused.")

    monkeypatch.setattr(routes, "sample_group", refuse)
    start, body = ask()
    assert (start["status"], body["body"]) == (503, b"RetryableRequestError: Generation is paused.")


def paused_engine(num_refusals: int, on_refusal=lambda engine: None) -> tuple[VllmEngine, list[int]]:
    """Return an engine whose server answers 503 to `num_refusals` groups, and then samples; and its statuses."""
    answered: list[int] = []
    tokens, log_probs = np.asarray([4], dtype="<i4").tobytes(), np.asarray([-1], dtype="<f4").tobytes()
    choice = GroupChoice(0, "length", tokens, tokens, log_probs, [routes.GroupSpan("3:abc", 0, 1)])
    engine = VllmEngine("engine-0", "/nowhere")
    engine.limits = Limits(max_model_len=8, max_num_seqs=1, vocab_size=9)
    engine.state, engine._version, engine._tag = EngineState.READY, 3, "3:abc"

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path != routes.GENERATE:
            return httpx.Response(200)
        answered.append(503 if len(answered) < num_refusals else 200)
        if answered[-1] == 503:
            on_refusal(engine)
            return httpx.Response(503, content=b"RetryableRequestError: Generation is paused.")
        return httpx.Response(200, content=msgspec.msgpack.encode(GroupAnswer([choice])))

    engine._connection._http = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://engine")
    return engine, answered


REQUEST = GroupRequest("r", (1, 2), 1, 0, Sampling(max_tokens=1))


def test_a_group_refused_by_an_engine_that_someone_else_paused_is_sent_until_it_resumes():
    engine, answered = paused_engine(2)
    (response,) = asyncio.run(engine.generate(REQUEST))
    assert (response.fingerprint, response.spans[0].version) == ("abc", "3")
    assert answered == [503, 503, 200]


def test_a_group_refused_by_an_engine_that_was_paused_for_a_publish_goes_back_to_the_pool():
    engine, answered = paused_engine(9, lambda engine: setattr(engine, "state", EngineState.PUBLISHING))
    with pytest.raises(EngineBusy, match="engine-0: generate was answered 503: .*Generation is paused"):
        asyncio.run(engine.generate(REQUEST))
    assert answered == [503]


class Derived(HoldsOutputs):
    """A user's scheduler that holds outputs too."""


def build_derived(vllm_config: Any, **arguments: Any) -> Derived:
    return Derived(vllm_config, **arguments)


class Front:
    """A client of a core with this scheduler, which samples one request for us; it notes who is asked to abort."""

    def __init__(self, scheduler: Any) -> None:
        self.asked: list[tuple] = []
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls=scheduler))
        self.output_processor = SimpleNamespace(external_req_ids={"r": ["0_r", "1_r"]})
        self.engine_core = SimpleNamespace(abort_requests_async=self._ask_core)

    async def abort(self, request_id: str) -> None:
        self.asked.append(("front end", request_id))

    async def _ask_core(self, request_ids: list[str]) -> None:
        self.asked.append(("core", *request_ids))


@pytest.mark.parametrize("scheduler", [SCHEDULER, f"{__name__}.Derived", Derived], ids=["ours", "a name", "a class"])
def test_a_cut_is_left_to_the_core_if_its_scheduler_holds_tokens(scheduler):
    front = Front(scheduler)
    assert ask(routes.END, msgspec.msgpack.encode(Cut("r")), engine=front)[0]["status"] == 200
    assert front.asked == [("core", "0_r", "1_r")]
    ask(routes.END, msgspec.msgpack.encode(Cut("another")), engine=front)
    assert len(front.asked) == 1


@pytest.mark.parametrize("scheduler", [None, f"{__name__}.Front", Front], ids=["vLLM's choice", "a name", "a class"])
def test_a_cut_is_answered_by_the_front_end_if_nothing_is_held_in_the_core(scheduler):
    front = Front(scheduler)
    assert ask(routes.END, msgspec.msgpack.encode(Cut("r")), engine=front)[0]["status"] == 200
    assert front.asked == [("front end", "r")]


def test_a_cut_is_refused_by_name_if_it_is_not_known_whether_the_scheduler_holds_tokens():
    front = Front(f"{__name__}.build_derived")
    start, body = ask(routes.END, msgspec.msgpack.encode(Cut("r")), engine=front)
    assert (start["status"], front.asked) == (400, [])
    assert f"--scheduler-cls {__name__}.build_derived must be a class".encode() in body["body"]


def test_a_group_whose_cut_is_refused_is_sampled_to_its_end_and_that_is_said(caplog):
    said = "cut was answered 400: ValueError: it is not known; request r is sampled to its end"

    async def scenario() -> list:
        engine, _ = paused_engine(0)
        answer = engine._connection._http._transport.handler

        async def refuse_cuts(request: httpx.Request) -> httpx.Response:
            if request.url.path == routes.END:
                return httpx.Response(400, content=b"ValueError: it is not known")
            if request.url.path == routes.GENERATE:
                async with asyncio.timeout(60):
                    while said not in caplog.text:
                        await asyncio.sleep(0.001)
            return answer(request)

        engine._connection._http = httpx.AsyncClient(
            transport=httpx.MockTransport(refuse_cuts), base_url="http://engine"
        )
        cut = asyncio.Event()
        cut.set()
        return await engine.generate(dataclasses.replace(REQUEST, cut=cut))

    (response,) = asyncio.run(scenario())
    assert response.finish_reason == "length"


def test_a_request_whose_client_has_left_is_cancelled_and_not_answered(monkeypatch):
    leaves, ended = asyncio.Event(), []

    async def sample(client, call):
        leaves.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    monkeypatch.setattr(routes, "sample_group", sample)
    assert ask(leaves=leaves) == []
    assert ended == [True]


def test_a_probe_that_is_not_finite_proves_the_weights_wrong():
    log_probs = np.asarray([-1, np.nan], dtype="<f4").tobytes()
    answer = GroupAnswer([], np.asarray([4, 5], dtype="<i4").tobytes(), log_probs)
    bodies = {routes.GENERATE: msgspec.msgpack.encode(answer)}
    engine = VllmEngine("engine-0", "/nowhere")
    engine.limits = Limits(max_model_len=8, max_num_seqs=1, vocab_size=9)
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=bodies[request.url.path]))
    engine._connection._http = httpx.AsyncClient(transport=transport, base_url="http://engine")
    with pytest.raises(WrongWeights, match="engine-0: its log-probs of the probe are not finite"):
        asyncio.run(engine.probe((3, 4, 5)))


class Server:
    """A server before a vLLM that records no versions: its loads are requested, and a group ends when it is told to."""

    def __init__(self) -> None:
        self.routes = Routes(self.load)
        self.finish, self.loads = asyncio.Event(), asyncio.Event()
        self.engine = SimpleNamespace(
            engine_core=self, collective_rpc=self.report, reset_prefix_cache=self.reset_prefix_cache
        )
        self.is_reset = True

    async def load(self, scope, receive, send) -> None:
        await self.loads.wait()

    async def pause_scheduler_async(self, **arguments) -> None: ...

    async def reset_prefix_cache(self, of_running: bool, of_connector: bool) -> bool:
        assert (of_running, of_connector) == (False, True)
        return self.is_reset

    async def report(self, method, timeout=None, args=()) -> list[dict[str, str]]:
        return [{"asked for": " ".join((method, *args))}]

    async def sample(self, client, call) -> GroupAnswer:
        await self.finish.wait()
        tokens = np.arange(3, dtype="<i4").tobytes()
        return GroupAnswer([GroupChoice(0, "stop", tokens, tokens, b"", spans=None)])

    async def post(self, path: str, body: bytes = b"") -> bytes:
        sent: list[dict] = []
        messages = [{"type": "http.request", "body": body}]

        async def receive() -> dict:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message: dict) -> None:
            sent.append(message)

        app = SimpleNamespace(state=SimpleNamespace(engine_client=self.engine))
        await self.routes({"type": "http", "method": "POST", "path": path, "app": app}, receive, send)
        return sent[-1]["body"] if sent else b""

    async def commit(self, tag: str, adapters: str = "") -> bytes:
        return await self.post(routes.COMMIT, msgspec.json.encode({"tag": tag, "adapters": adapters}))

    async def spans(self) -> list[tuple] | None:
        answer = msgspec.msgpack.decode(await self.post(routes.GENERATE, CALL), type=GroupAnswer)
        spans = answer.choices[0].spans
        return None if spans is None else [(span.version, span.start, span.end) for span in spans]


@pytest.mark.parametrize(
    ("meanwhile", "spans"),
    [
        ("nothing", [("3:abc", 0, 3)]),
        ("a pause that waits for it", [("3:abc", 0, 3)]),
        ("a load", None),
        ("a load that is still open", None),
        ("another commit", None),
    ],
)
def test_a_server_proves_what_sampled_a_group_where_vllm_does_not_record_it(monkeypatch, meanwhile, spans):
    async def scenario() -> list[tuple] | None:
        server = Server()
        monkeypatch.setattr(routes, "sample_group", server.sample)
        await server.commit("3:abc")
        group = asyncio.create_task(server.spans())
        await asyncio.sleep(0)
        if meanwhile == "a load":
            server.loads.set()
        load = asyncio.create_task(server.post("/collective_rpc")) if "load" in meanwhile else None
        if meanwhile == "another commit":
            await server.commit("3:abc")
        if meanwhile.startswith("a pause"):
            await server.post(routes.PAUSE)
        for _ in range(5):
            await asyncio.sleep(0)
        server.finish.set()
        found = await group
        if load is not None:
            load.cancel()
        return found

    assert asyncio.run(scenario()) == spans


@pytest.mark.parametrize(
    ("before", "spans"),
    [("no commit", [("", 0, 3)]), ("a load that is open", None), ("a pause without a commit", [("", 0, 3)])],
)
def test_a_group_that_begins_while_weights_are_not_committed_has_no_version(monkeypatch, before, spans):
    async def scenario() -> list[tuple] | None:
        server = Server()
        server.finish.set()
        monkeypatch.setattr(routes, "sample_group", server.sample)
        if before != "no commit":
            await server.commit("3:abc")
        if before == "a pause without a commit":
            await server.post(routes.PAUSE)
        load = asyncio.create_task(server.post("/collective_rpc")) if "open" in before else None
        await asyncio.sleep(0)
        found = await server.spans()
        if load is not None:
            load.cancel()
        return found

    assert asyncio.run(scenario()) == spans


@pytest.mark.parametrize("keeps_a_name", [True, False])
def test_a_commit_answers_with_the_name_that_is_kept_and_with_the_workers_reports(keeps_a_name):
    async def scenario() -> bytes:
        server = Server()
        if keeps_a_name:
            kept: list[str] = []

            async def update(tag):
                kept.append(f"vLLM's {tag}")

            async def get():
                return kept[-1]

            server.engine.update_weight_version, server.engine.get_weight_version = update, get
        return await server.commit("3:abc")

    held = msgspec.msgpack.decode(asyncio.run(scenario()), type=routes.Committed)
    assert held == routes.Committed(
        "vLLM's 3:abc" if keeps_a_name else "3:abc", [{"asked for": "megatron_rl_report"}], True
    )


def test_a_commit_drops_the_metrics_of_former_adapters():
    gauge = Gauge("lora_requests_info", "As vLLM's.", ["running_lora_adapters"], registry=None)

    async def scenario() -> None:
        server = Server()
        loggers = [SimpleNamespace(), SimpleNamespace(gauge_lora_info=None), SimpleNamespace(gauge_lora_info=gauge)]
        server.engine.logger_manager = SimpleNamespace(stat_loggers=loggers)
        for version in range(3):
            await server.commit(f"{version}:abc", f"{version}:abc")
            gauge.labels(f"{version}:abc").set_to_current_time()

    asyncio.run(scenario())
    (metric,) = gauge.collect()
    assert [sample.labels for sample in metric.samples] == [{"running_lora_adapters": "2:abc"}]


@pytest.mark.parametrize(
    ("held", "refusal"),
    [
        (routes.Committed("3:abc", [{"fingerprint": "abc"}, {"fingerprint": "abc"}], is_reset=False), "was not reset"),
        (
            routes.Committed("2:abc", [{"fingerprint": "abd"}], is_reset=True),
            "tagged '2:abc', but its workers hold .* 'abd'",
        ),
        (
            routes.Committed("3:abc", [{"fingerprint": "abc"}, {"fingerprint": "abd"}], is_reset=True),
            "its workers differ",
        ),
        (routes.Committed("3:abc", [{"error": "torn", "code": "refused"}], is_reset=True), "worker 0, commit: torn"),
    ],
)
def test_an_engine_that_holds_other_things_after_a_commit_is_refused(held, refusal):
    engine = VllmEngine("engine-0", "/nowhere")
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=msgspec.msgpack.encode(held)))
    engine._connection._http = httpx.AsyncClient(transport=transport, base_url="http://engine")
    with pytest.raises(EngineRefused, match=f"engine-0.*{refusal}"):
        asyncio.run(engine.commit(WeightReport(3, "abc")))
    assert engine.state is not EngineState.READY


def test_a_call_that_resumes_changes_weights_for_no_response_of_its_own(monkeypatch):
    resumed: list[bool] = []

    async def resume() -> None:
        resumed.append(True)

    async def scenario() -> list[tuple] | None:
        server = Server()
        server.engine.resume_generation = resume
        monkeypatch.setattr(routes, "sample_group", server.sample)
        server.finish.set()
        await server.commit("3:abc")
        call = msgspec.msgpack.encode(
            msgspec.structs.replace(msgspec.msgpack.decode(CALL, type=GroupCall), resumes=True)
        )
        answer = msgspec.msgpack.decode(await server.post(routes.GENERATE, call), type=GroupAnswer)
        return [(span.version, span.start, span.end) for span in answer.choices[0].spans or ()]

    assert (asyncio.run(scenario()), resumed) == ([("3:abc", 0, 3)], [True])


def test_reading_changes_nothing():
    held = routes.ServedWeights(tag="3:abc")

    async def scenario() -> None:
        scope = {"type": "http", "method": "GET", "path": "/health"}
        server = Routes(nobody)
        server._held = held
        await server(scope, None, lambda message: asyncio.sleep(0))

    asyncio.run(scenario())
    assert held.num_begun == 0


def test_the_experts_of_a_prompt_are_those_of_its_first_response_and_each_response_has_its_own(monkeypatch):
    def output(index: int) -> SimpleNamespace:
        # A row for each token but the last: two of the prompt, and the first of the response.
        rows = np.arange(12, dtype=np.uint8).reshape(3, 2, 2) + 100 * index
        flat = SimpleNamespace(token_ids=[5, 6], logprobs=[-1.0, -2.0])
        return SimpleNamespace(
            index=index, finish_reason="stop", token_ids=[5, 6], logprobs=flat, routed_experts=rows, weight_versions=[]
        )

    async def render(prompts):
        return prompts

    async def generate(*_):
        yield SimpleNamespace(outputs=[output(0), output(1)], prompt_logprobs=None)

    modules = {"vllm": SimpleNamespace(), "vllm.sampling_params": SimpleNamespace(
        RequestOutputKind=SimpleNamespace(FINAL_ONLY=2), SamplingParams=dict
    )}  # fmt: skip
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    client = SimpleNamespace(renderer=SimpleNamespace(render_cmpl_async=render), generate=generate)
    call = GroupCall("r", np.asarray([3, 4], dtype="<i4").tobytes(), {}, "salt")
    answer = asyncio.run(routes.sample_group(client, call))
    assert answer.prompt_experts == bytes(range(8))
    assert [choice.experts for choice in answer.choices] == [bytes([8, 9, 10, 11]), bytes([108, 109, 110, 111])]


@pytest.mark.parametrize("named", [None, "3:abc", "4:abc"])
@pytest.mark.parametrize("held", ["", "4:abc"])
def test_only_a_group_that_names_the_committed_adapters_is_sampled(monkeypatch, named, held):
    async def scenario() -> tuple[bytes, bytes]:
        server = Server()
        server.finish.set()
        monkeypatch.setattr(routes, "sample_group", server.sample)
        await server.commit("4:abc", held)
        adapters = None if named is None else AdaptersName(named, 5)
        call = msgspec.msgpack.encode(GroupCall("r", b"", {"n": 1}, "4:abc", adapters))
        first = await server.post(routes.GENERATE, call)
        # Weights that are loaded next belong to no version yet.
        await server.post(routes.PAUSE)
        return first, await server.post(routes.GENERATE, call)

    first, second = asyncio.run(scenario())
    refusal = b"the request names " + (named or "no adapters").encode()
    assert (refusal in first) == ((named or "") != held)
    assert (refusal in second) == (named is not None)


@pytest.mark.parametrize("adapters", [None, AdaptersName("4:abc", 5)])
def test_vllm_gets_the_adapters_that_a_group_names_and_the_answer_says_so(monkeypatch, adapters):
    asked = []

    class Request:
        def __init__(self, name: str, number: int, path: str) -> None:
            self.lora_name, self.number, self.path = name, number, path

    class Client:
        class renderer:
            @staticmethod
            async def render_cmpl_async(prompts):
                return prompts

        async def generate(self, prompt, params, request_id, **named):
            asked.append(named)
            yield SimpleNamespace(outputs=[], prompt_logprobs=None, **{"lora_request": None, **named})

    modules = {"vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY=0), "SamplingParams": dict}}
    modules |= {"vllm.lora.request": {"LoRARequest": Request}}
    for name, members in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))
    call = GroupCall("r", b"", {"n": 1}, "4:abc", adapters)
    answer = asyncio.run(routes.sample_group(Client(), call))
    assert answer.adapters == ("" if adapters is None else "4:abc")
    (named,) = asked
    if adapters is None:
        assert named == {}
    else:
        request = named["lora_request"]
        assert (request.lora_name, request.number) == ("4:abc", 5)
        assert not Path(request.path).exists()
