"""Our routes of a vLLM server, with a stand-in for vLLM."""

import asyncio
import dataclasses
import functools
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
from megatron_rl.sidecar.vllm.routes import AdaptersName, Cut, GroupAnswer, GroupCall, GroupChoice, Routes
from megatron_rl.sidecar.vllm.scheduler import SCHEDULER, HoldsOutputs
from tests.sidecar.mock_server import connect, connect_always, reply

CALL = GroupCall("r", b"", {"n": 2}, "3:abc")
ANSWER = GroupAnswer([])
REQUEST = GroupRequest("r", (1, 2), 1, 0, Sampling(max_tokens=1))


def pack(*values: float, dtype: str = "<i4") -> bytes:
    return np.asarray(values, dtype=dtype).tobytes()


async def nobody(scope, receive, send):
    await send({"type": "http.response.start", "status": 404, "headers": []})


async def post(
    server: Routes, engine: Any, path: str = routes.GENERATE, body: bytes = b"", leaves: asyncio.Event | None = None
) -> list[dict]:
    """Return what a server sends; a client that `leaves` is gone once this is set."""
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
    await server({"type": "http", "method": "POST", "path": path, "app": app}, receive, send)
    return sent


def ask(path: str = routes.GENERATE, call: Any = CALL, engine: Any = "the engine", **client: Any) -> list[dict]:
    body = call if isinstance(call, bytes) else msgspec.msgpack.encode(call)
    return asyncio.run(post(Routes(nobody), engine, path, body, **client))


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


@pytest.mark.parametrize(
    "names", [["pause_scheduler_async"], ["pause_scheduler_async", "pause_generation_async"]], ids=["0.32", "0.33"]
)
def test_a_pause_waits_for_what_is_in_flight_and_refuses_new_groups_where_vllm_can(names):
    asked = []

    async def pause(name: str, **arguments: Any) -> None:
        asked.append((name, arguments))

    core = SimpleNamespace(**{name: functools.partial(pause, name) for name in names})
    start, _ = ask(routes.PAUSE, engine=SimpleNamespace(engine_core=core))
    assert start["status"] == 200
    assert asked == [(names[-1], {"mode": "wait", "clear_cache": False})]


def test_other_paths_are_for_vllm_to_answer():
    assert ask("/health")[0]["status"] == 404


class RetryableRequestError(Exception):
    """An error as vLLM 0.33 raises it while it is paused."""

    status_code = HTTPStatus.SERVICE_UNAVAILABLE


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("the prompt is too long"), 400),
        (RuntimeError("the engine is dead"), 500),
        # The group may be sent again.
        (RetryableRequestError("Generation is paused."), 503),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_request_that_vllm_refuses_is_answered_with_its_words(monkeypatch, error, status):
    async def refuse(client, call):
        raise error

    monkeypatch.setattr(routes, "sample_group", refuse)
    start, body = ask()
    assert (start["status"], body["body"].decode()) == (status, f"{type(error).__name__}: {error}")


def test_a_call_that_cannot_be_read_is_refused():
    assert ask(call=b"\xc1 no message")[0]["status"] == 400


class Paused:
    """A server that answers 503 to `num_refusals` groups, and then samples."""

    def __init__(self, num_refusals: int = 0) -> None:
        self.num_refusals = num_refusals
        self.answered: list[int] = []
        self.engine = connect(self.answer)
        self.engine.state, self.engine._version, self.engine._tag = EngineState.READY, 3, "3:abc"

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != routes.GENERATE:
            return httpx.Response(200)
        self.answered.append(503 if len(self.answered) < self.num_refusals else 200)
        if self.answered[-1] == 503:
            return self.refuse()
        choice = GroupChoice(0, "length", pack(4), pack(4), pack(-1, dtype="<f4"), [routes.GroupSpan("3:abc", 0, 1)])
        return reply(GroupAnswer([choice]))

    def refuse(self) -> httpx.Response:
        return httpx.Response(503, content=b"RetryableRequestError: Generation is paused.")


def test_a_group_refused_by_an_engine_that_someone_else_paused_is_sent_until_it_resumes():
    server = Paused(2)
    (response,) = asyncio.run(server.engine.generate(REQUEST))
    assert (response.fingerprint, response.spans[0].version) == ("abc", "3")
    assert server.answered == [503, 503, 200]


def test_a_group_refused_by_an_engine_that_was_paused_for_a_publish_goes_back_to_the_pool():
    class Published(Paused):
        def refuse(self) -> httpx.Response:
            self.engine.state = EngineState.PUBLISHING
            return super().refuse()

    server = Published(9)
    with pytest.raises(EngineBusy, match="engine-0: generate was answered 503: .*Generation is paused"):
        asyncio.run(server.engine.generate(REQUEST))
    assert server.answered == [503]


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


BY_CORE, BY_FRONT_END = ("core", "0_r", "1_r"), ("front end", "r")


@pytest.mark.parametrize(
    ("scheduler", "request_id", "asked"),
    [
        *((scheduler, "r", [BY_CORE]) for scheduler in (SCHEDULER, f"{__name__}.Derived", Derived)),
        (SCHEDULER, "another", []),
        *((scheduler, "r", [BY_FRONT_END]) for scheduler in (None, f"{__name__}.Front", Front)),
    ],
)
def test_a_cut_is_left_to_the_core_only_if_its_scheduler_holds_tokens(scheduler, request_id, asked):
    front = Front(scheduler)
    assert ask(routes.END, Cut(request_id), front)[0]["status"] == 200
    assert front.asked == asked


def test_a_cut_is_refused_by_name_if_it_is_not_known_whether_the_scheduler_holds_tokens():
    front = Front(f"{__name__}.build_derived")
    start, body = ask(routes.END, Cut("r"), front)
    assert (start["status"], front.asked) == (400, [])
    assert f"--scheduler-cls {__name__}.build_derived must be a class".encode() in body["body"]


def test_a_group_whose_cut_is_refused_is_sampled_to_its_end_and_that_is_said(caplog):
    said = "cut was answered 400: ValueError: it is not known; request r is sampled to its end"

    async def scenario() -> list:
        server, cut = Paused(), asyncio.Event()

        async def refuse_cuts(request: httpx.Request) -> httpx.Response:
            if request.url.path == routes.END:
                return httpx.Response(400, content=b"ValueError: it is not known")
            if request.url.path == routes.GENERATE:
                async with asyncio.timeout(60):
                    while said not in caplog.text:
                        await asyncio.sleep(0.001)
            return server.answer(request)

        server.engine._connection._http = connect(refuse_cuts)._connection._http
        cut.set()
        return await server.engine.generate(dataclasses.replace(REQUEST, cut=cut))

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
    engine = connect_always(GroupAnswer([], pack(4, 5), pack(-1, np.nan, dtype="<f4")))
    with pytest.raises(WrongWeights, match="engine-0: its log-probs of the probe are not finite"):
        asyncio.run(engine.probe((3, 4, 5)))


class Server:
    """A server before a vLLM that records no versions: its loads are requested, and a group ends when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(routes, "sample_group", self.sample)
        self.routes = Routes(self.load)
        self.finish, self.loads = asyncio.Event(), asyncio.Event()
        self.resumed: list[bool] = []
        self.engine = SimpleNamespace(
            engine_core=self, collective_rpc=self.report, reset_prefix_cache=self.reset_prefix_cache,
            resume_generation=self.resume,
        )  # fmt: skip
        self.open_loads: list[asyncio.Task] = []

    async def load(self, scope, receive, send) -> None:
        await self.loads.wait()

    async def pause_scheduler_async(self, **arguments) -> None: ...

    async def resume(self) -> None:
        self.resumed.append(True)

    async def reset_prefix_cache(self, of_running: bool, of_connector: bool) -> bool:
        assert (of_running, of_connector) == (False, True)
        return True

    async def report(self, method, timeout=None, args=()) -> list[dict[str, str]]:
        return [{"asked for": " ".join((method, *args))}]

    async def sample(self, client, call) -> GroupAnswer:
        await self.finish.wait()
        tokens = pack(0, 1, 2)
        return GroupAnswer([GroupChoice(0, "stop", tokens, tokens, b"", spans=None)])

    async def post(self, path: str, body: bytes = b"") -> bytes:
        sent = await post(self.routes, self.engine, path, body)
        return sent[-1]["body"] if sent else b""

    async def commit(self, tag: str, adapters: str = "") -> bytes:
        return await self.post(routes.COMMIT, msgspec.json.encode({"tag": tag, "adapters": adapters}))

    async def do(self, step: str) -> None:
        if step == "commit":
            await self.commit("3:abc")
        elif step == "pause":
            await self.post(routes.PAUSE)
        else:
            if step == "load":
                self.loads.set()
            self.open_loads.append(asyncio.create_task(self.post("/collective_rpc")))
            for _ in range(5):
                await asyncio.sleep(0)

    async def spans(self, resumes: bool = False) -> list[tuple] | None:
        call = msgspec.msgpack.encode(msgspec.structs.replace(CALL, resumes=resumes))
        answer = msgspec.msgpack.decode(await self.post(routes.GENERATE, call), type=GroupAnswer)
        spans = answer.choices[0].spans
        return None if spans is None else [(span.version, span.start, span.end) for span in spans]


@pytest.mark.parametrize(
    ("before", "meanwhile", "spans"),
    [
        (["commit"], [], [("3:abc", 0, 3)]),
        # A pause waits for the group.
        (["commit"], ["pause"], [("3:abc", 0, 3)]),
        (["commit"], ["load"], None),
        (["commit"], ["open load"], None),
        (["commit"], ["commit"], None),
        # A group that begins while weights are not committed has no version.
        ([], [], [("", 0, 3)]),
        (["commit", "open load"], [], None),
        (["commit", "pause"], [], [("", 0, 3)]),
    ],
    ids=str,
)
def test_a_server_proves_what_sampled_a_group_where_vllm_does_not_record_it(monkeypatch, before, meanwhile, spans):
    async def scenario() -> list[tuple] | None:
        server = Server(monkeypatch)
        for step in before:
            await server.do(step)
        group = asyncio.create_task(server.spans())
        await asyncio.sleep(0)
        for step in meanwhile:
            await server.do(step)
        server.finish.set()
        return await group

    assert asyncio.run(scenario()) == spans


def test_a_call_that_resumes_changes_weights_for_no_response_of_its_own(monkeypatch):
    async def scenario() -> tuple[list[tuple] | None, list[bool]]:
        server = Server(monkeypatch)
        server.finish.set()
        await server.commit("3:abc")
        return await server.spans(resumes=True), server.resumed

    assert asyncio.run(scenario()) == ([("3:abc", 0, 3)], [True])


def test_reading_changes_nothing():
    held = routes.ServedWeights(tag="3:abc")

    async def scenario() -> None:
        scope = {"type": "http", "method": "GET", "path": "/health"}
        server = Routes(nobody)
        server._held = held
        await server(scope, None, lambda message: asyncio.sleep(0))

    asyncio.run(scenario())
    assert held.num_begun == 0


@pytest.mark.parametrize("keeps_a_name", [True, False])
def test_a_commit_answers_with_the_name_that_is_kept_and_with_the_workers_reports(monkeypatch, keeps_a_name):
    kept: list[str] = []

    async def update(tag):
        kept.append(f"vLLM's {tag}")

    async def get():
        return kept[-1]

    async def scenario() -> bytes:
        server = Server(monkeypatch)
        if keeps_a_name:
            server.engine.update_weight_version, server.engine.get_weight_version = update, get
        return await server.commit("3:abc")

    held = msgspec.msgpack.decode(asyncio.run(scenario()), type=routes.Committed)
    assert held == routes.Committed(
        "vLLM's 3:abc" if keeps_a_name else "3:abc", [{"asked for": "megatron_rl_report"}], True
    )


def test_a_commit_drops_the_metrics_of_former_adapters(monkeypatch):
    gauge = Gauge("lora_requests_info", "As vLLM's.", ["running_lora_adapters"], registry=None)

    async def scenario() -> None:
        server = Server(monkeypatch)
        loggers = [SimpleNamespace(), SimpleNamespace(gauge_lora_info=None), SimpleNamespace(gauge_lora_info=gauge)]
        server.engine.logger_manager = SimpleNamespace(stat_loggers=loggers)
        for version in range(3):
            await server.commit(f"{version}:abc", f"{version}:abc")
            gauge.labels(f"{version}:abc").set_to_current_time()

    asyncio.run(scenario())
    (metric,) = gauge.collect()
    assert [sample.labels for sample in metric.samples] == [{"running_lora_adapters": "2:abc"}]


@pytest.mark.parametrize(
    ("tag", "workers", "is_reset", "refusal"),
    [
        ("3:abc", [{"fingerprint": "abc"}, {"fingerprint": "abc"}], False, "was not reset"),
        ("2:abc", [{"fingerprint": "abd"}], True, "tagged '2:abc', but its workers hold .* 'abd'"),
        ("3:abc", [{"fingerprint": "abc"}, {"fingerprint": "abd"}], True, "its workers differ"),
        ("3:abc", [{"error": "torn", "code": "refused"}], True, "worker 0, commit: torn"),
    ],
)
def test_an_engine_that_holds_other_things_after_a_commit_is_refused(tag, workers, is_reset, refusal):
    engine = connect_always(routes.Committed(tag, workers, is_reset))
    with pytest.raises(EngineRefused, match=f"engine-0.*{refusal}"):
        asyncio.run(engine.commit(WeightReport(3, "abc")))
    assert engine.state is not EngineState.READY


@pytest.mark.parametrize("named", [None, "3:abc", "4:abc"])
@pytest.mark.parametrize("held", ["", "4:abc"])
def test_only_a_group_that_names_the_committed_adapters_is_sampled(monkeypatch, named, held):
    async def scenario() -> tuple[bytes, bytes]:
        server = Server(monkeypatch)
        server.finish.set()
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


def sample(monkeypatch: pytest.MonkeyPatch, call: GroupCall, *outputs: Any) -> tuple[GroupAnswer, dict[str, Any]]:
    """Have a stand-in for vLLM sample these outputs; return the answer, and what vLLM was asked for by name."""
    asked: dict[str, Any] = {}

    async def render(prompts):
        return prompts

    async def generate(prompt, params, request_id, **named):
        asked.update(named)
        yield SimpleNamespace(outputs=list(outputs), prompt_logprobs=None, **{"lora_request": None, **named})

    def request_adapters(name: str, number: int, path: str) -> SimpleNamespace:
        return SimpleNamespace(lora_name=name, number=number, path=path)

    kinds = SimpleNamespace(FINAL_ONLY=2)
    for name, members in (
        ("vllm", {}),
        ("vllm.sampling_params", {"RequestOutputKind": kinds, "SamplingParams": dict}),
        ("vllm.lora.request", {"LoRARequest": request_adapters}),
    ):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))
    client = SimpleNamespace(renderer=SimpleNamespace(render_cmpl_async=render), generate=generate)
    return asyncio.run(routes.sample_group(client, call)), asked


def test_the_experts_of_a_prompt_are_those_of_its_first_response_and_each_response_has_its_own(monkeypatch):
    def output(index: int) -> SimpleNamespace:
        # A row for each token but the last: two of the prompt, and the first of the response.
        rows = np.arange(12, dtype=np.uint8).reshape(3, 2, 2) + 100 * index
        flat = SimpleNamespace(token_ids=[5, 6], logprobs=[-1.0, -2.0])
        return SimpleNamespace(
            index=index, finish_reason="stop", token_ids=[5, 6], logprobs=flat, routed_experts=rows, weight_versions=[]
        )

    answer, _ = sample(monkeypatch, GroupCall("r", pack(3, 4), {}, "salt"), output(0), output(1))
    assert answer.prompt_experts == bytes(range(8))
    assert [choice.experts for choice in answer.choices] == [bytes([8, 9, 10, 11]), bytes([108, 109, 110, 111])]


@pytest.mark.parametrize("adapters", [None, AdaptersName("4:abc", 5)])
def test_vllm_gets_the_adapters_that_a_group_names_and_the_answer_says_so(monkeypatch, adapters):
    answer, asked = sample(monkeypatch, GroupCall("r", b"", {"n": 1}, "4:abc", adapters))
    assert answer.adapters == ("" if adapters is None else "4:abc")
    if adapters is None:
        assert asked == {}
    else:
        request = asked["lora_request"]
        assert (request.lora_name, request.number) == ("4:abc", 5)
        assert not Path(request.path).exists()
