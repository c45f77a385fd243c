"""The routes of the rollout service: binary bodies, and a token for every route but health."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import FastAPI, Query, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from megatron_rl.errors import InputError, MegatronRLError, UsageError
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.hosts import DeliveryHosts, LeftOut
from megatron_rl.shared.protocol.wire import ErrorAnswer, ErrorCode
from megatron_rl.sidecar.evaluation import EvaluationFailed
from megatron_rl.sidecar.iteration import ClaimConflict, IterationFailed, NoSuchSlot, NotAllClaimed, WrongVersion
from megatron_rl.sidecar.service import Conflict, RolloutService
from megatron_rl.sidecar.serving import OPEN, Guard
from megatron_rl.sidecar.supervisor import WrongWorkerCount

MAX_BODY_BYTES = 1 << 30
MAX_PATIENCE_SECONDS = 60.0
MAX_NEW_ENGINES = 64
_PATIENCE = {"parameters": [{"name": "patience", "in": "query", "schema": {"type": "number", "default": 30}}]}
_STATUS: tuple[tuple[tuple[type[Exception], ...], int, ErrorCode], ...] = (
    ((IterationFailed,), 410, ErrorCode.ITERATION_FAILED),
    ((EvaluationFailed,), 410, ErrorCode.EVALUATION_FAILED),
    ((Conflict, WrongVersion, NotAllClaimed, ClaimConflict), 409, ErrorCode.REFUSED),
    ((NoSuchSlot,), 404, ErrorCode.REFUSED),
    ((InputError, UsageError), 400, ErrorCode.REFUSED),
    ((WrongWorkerCount,), 500, ErrorCode.WORKERS_CHANGED),
    ((Exception,), 500, ErrorCode.REFUSED),
)
"""The status and the code of each error; the first row that fits counts."""

T = TypeVar("T", bound=msgspec.Struct)


def build_application(service: RolloutService, token: str, shutdown: Callable[[], None]) -> FastAPI:
    app = FastAPI(title="megatron_rl rollout service", version=str(wire.WIRE_VERSION), docs_url=None, redoc_url=None)
    app.add_middleware(Guard, token=token)
    app.add_exception_handler(MegatronRLError, _report)
    _trainer_routes(app, service)
    _evaluation_routes(app, service)
    _host_routes(app, service)
    _operator_routes(app, service, shutdown)
    return app


async def _report(_: Request, error: Exception) -> Response:
    status, code = next((status, code) for kinds, status, code in _STATUS if isinstance(error, kinds))
    return JSONResponse(msgspec.to_builtins(ErrorAnswer(error=str(error), code=code)), status_code=status)


async def _receive(request: Request, service: RolloutService, kind: type[T]) -> T:
    """Renew the lease of a trainer's request, and return its message."""
    service.renew_lease(_read_lease(request))
    return await _body(request, kind)


async def _body(request: Request, kind: type[T]) -> T:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise InputError(f"a body must have at most {MAX_BODY_BYTES} bytes: send fewer prompts an iteration")
    return wire.decode(bytes(data), kind)


def renew_lease(service: RolloutService, request: Request) -> None:
    """Renew the lease that a request names; raise an error if it is not held."""
    service.renew_lease(_read_lease(request))


def _read_lease(request: Request) -> int:
    text = request.headers.get("x-lease", "")
    if not text.isdigit():
        raise InputError("the header X-Lease must be a number: take a lease with POST /v1/lease")
    return int(text)


def _trainer_routes(app: FastAPI, service: RolloutService) -> None:
    @app.post("/v1/lease")
    async def take_lease(run: str, version: Annotated[int, Query(alias="wire")] = 1) -> dict[str, int]:
        """Work for this run from now on. Its requests must have the answer's number in X-Lease.

        `wire` is the trainer's wire version, which a trainer of version 1 does not send.
        """
        wire.check_version(version, "the trainer")
        return {"lease": await service.take_lease(run), "wire": wire.WIRE_VERSION}

    @app.post("/v1/publish")
    async def publish(request: Request) -> dict[str, Any]:
        """Publish a version; answer when every engine holds it, or none does. Body: Weights."""
        weights = await _receive(request, service, wire.Weights)
        published = await service.publish(weights)
        return {
            "version": weights.version,
            "seconds": service.counters.publish_seconds,
            "published": msgspec.to_builtins(published),
        }

    @app.post("/v1/probe")
    async def probed(request: Request) -> dict[str, int]:
        """Take the trainer's log-probs of a probe, for which the publish of its version waits. Body: ProbeAnswer."""
        answer = await _receive(request, service, wire.ProbeAnswer)
        service.probed(answer)
        return {"version": answer.version}

    @app.post("/v1/iterations")
    async def submit(request: Request) -> dict[str, int]:
        """Start an iteration and answer at once; slots come as groups finish. Body: Submission."""
        submission = await _receive(request, service, wire.Submission)
        await service.submit(submission)
        return {"version": submission.version}

    # Requested more often than all other routes together, so its parameters are read without FastAPI's machinery.
    @app.get("/v1/iterations/{version:int}/slots/{replica:int}/{index:int}", openapi_extra=_PATIENCE)
    async def slot(request: Request) -> Response:
        """Answer with a Slot; 204 if none comes within `patience` seconds, 410 if the iteration has failed."""
        service.renew_lease(_read_lease(request))
        place = request.path_params
        patience = _bounded(_number(request.query_params.get("patience", "30")))
        data = await service.slot(place["version"], place["replica"], place["index"], patience)
        return Response(status_code=204) if data is None else Response(data, media_type=wire.MEDIA_TYPE)

    @app.post("/v1/iterations/{version}/sleep")
    async def sleep(request: Request, version: int) -> dict[str, int]:
        """Have engines give their devices to the ranks, once these have all slots; answer when all have."""
        service.renew_lease(_read_lease(request))
        await service.sleep(version)
        return {"version": version}

    @app.post("/v1/iterations/{version}/complete")
    async def complete(request: Request, version: int) -> dict[str, Any]:
        """End an iteration after the trainer has trained on every slot. Body: Trained, or nothing.

        The answer has hash and number of the audit log's last line, and the census of the prompts.
        """
        service.renew_lease(_read_lease(request))
        trained = await _body(request, wire.Trained) if int(request.headers.get("content-length", "0")) else None
        ended = service.complete(version, trained, await service.engines.count_drafts())
        answer: dict[str, Any] = msgspec.to_builtins(ended)
        return answer

    @app.post("/v1/iterations/{version}/refuse")
    async def refuse(request: Request, version: int) -> dict[str, int]:
        """Fail an iteration whose tokens are too far from the trainer's policy. Body: Trained."""
        trained = await _receive(request, service, wire.Trained)
        await service.refuse(version, trained.mismatch)
        return {"version": version}


def _evaluation_routes(app: FastAPI, service: RolloutService) -> None:
    @app.post("/v1/evaluations")
    async def evaluate(request: Request) -> dict[str, int]:
        """Start an evaluation and answer at once; its groups come after those of a running iteration.

        Body: Evaluation.
        """
        evaluation = await _receive(request, service, wire.Evaluation)
        await service.evaluate(evaluation)
        return {"version": evaluation.version}

    @app.get("/v1/evaluations/{version}")
    async def evaluated(request: Request, version: int, patience: float = 30.0) -> Response:
        """Answer with an Evaluated; 204 if it does not finish within `patience` seconds, 410 if it has failed."""
        service.renew_lease(_read_lease(request))
        data = await service.evaluated(version, _bounded(patience))
        return Response(status_code=204) if data is None else Response(data, media_type=wire.MEDIA_TYPE)


def _host_routes(app: FastAPI, service: RolloutService) -> None:
    @app.get("/v1/hosts")
    async def hosts(request: Request) -> Response:
        """Answer with the DeliveryHosts to which a trainer brings weights; none if all engines share its folder."""
        service.renew_lease(_read_lease(request))
        listed = DeliveryHosts(epoch=0, token="", hosts=[])
        if service.hosts is not None:
            listed = service.hosts.list_for_delivery(service.engines.status()["engines"])
        return Response(wire.encode(listed), media_type=wire.MEDIA_TYPE)

    @app.post("/v1/hosts/{name}/lost")
    async def leave_out(request: Request, name: str) -> dict[str, str]:
        """Note that a version was not delivered to a host; its engines wait for the next. Body: LeftOut."""
        told = await _receive(request, service, LeftOut)
        if service.hosts is None:
            raise InputError(f"unknown host {name!r}: this sidecar has no other hosts")
        service.hosts.leave_out(name, told.version, told.reason)
        return {"host": name}


def _operator_routes(app: FastAPI, service: RolloutService, shutdown: Callable[[], None]) -> None:
    @app.get(OPEN)
    async def health() -> dict[str, str]:
        """Answer that the service runs, and nothing else; needs no token."""
        return {"status": "ok"}

    @app.get("/v1/status")
    async def status() -> dict[str, Any]:
        """Answer with the state of the service, its engines and the requests that wait."""
        return service.status()

    @app.get("/v1/clock")
    async def clock() -> dict[str, float]:
        """Answer with the steady clock of this process, in seconds. Its trace has the same clock."""
        return {"clock": time.monotonic()}

    @app.post("/v1/engines")
    async def add_engines(count: int = 1, adopt: str | None = None) -> dict[str, list[str]]:
        """Start more engines, or adopt one of this host by its socket; they join once they hold the version."""
        if adopt is not None:
            return {"engines": [await service.engines.adopt(adopt)]}
        if not 1 <= count <= MAX_NEW_ENGINES:
            raise InputError(f"count={count} must be from 1 to {MAX_NEW_ENGINES}")
        return {"engines": service.engines.add(count)}

    @app.delete("/v1/engines/{name}")
    async def remove_engine(name: str) -> dict[str, str]:
        """Remove an engine with the next publish."""
        service.engines.remove(name)
        return {"engine": name}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Answer with the metrics for Prometheus."""
        return Response(format_metrics(service.status()), media_type="text/plain; version=0.0.4")

    @app.post("/v1/shutdown")
    async def end() -> dict[str, str]:
        """End the sidecar and its engines."""
        asyncio.get_running_loop().call_later(0.05, shutdown)
        return {"status": "ending"}

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return get_swagger_ui_html(openapi_url="/openapi.json", title=app.title)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"patience={text} must be a number of seconds") from None


def _bounded(patience: float) -> float:
    """Limit the patience; NaN and negative numbers count as 0."""
    return min(max(patience, 0.0), MAX_PATIENCE_SECONDS) if patience == patience else 0.0


_PREFIX = "megatron_rl_rollout"


def format_metrics(status: dict[str, Any]) -> bytes:
    """Format the status for Prometheus, with a gauge for each number; counters of the sidecar's life only grow."""
    registry = CollectorRegistry()

    def gauge(name: str, text: str, values: Mapping[Any, float], labels: tuple[str, ...] = ()) -> None:
        metric = Gauge(f"{_PREFIX}_{name}", text, labels, registry=registry)
        for key, value in values.items():
            (metric.labels(*key) if labels else metric).set(value)

    version = status["version"]
    gauge("version", "The version that engines hold; -1 for none.", {(): -1 if version is None else version})
    for name, value in status["counters"].items():
        gauge(name, f"The sidecar's {name.replace('_', ' ')}.", {(): value})
    gauge("slots_waited_for", "Slots that ranks wait for.", {(): len(status["slots_waited_for"])})
    if status["max_in_flight"] is not None:
        gauge("max_in_flight", "Responses that each engine may have in flight now.", {(): status["max_in_flight"]})
    iteration = status["iteration"]
    if iteration is not None:
        groups = {(progress,): count for progress, count in iteration["groups"].items()}
        gauge("iteration_groups", "Groups of the current iteration.", groups, ("progress",))
        gauge("iteration_failed", "1 when the current iteration has failed.", {(): iteration["failure"] is not None})
    engines = status["engines"].get("engines", {})
    for key, text in (("in_flight", "Responses in flight."), ("restarts", "Starts after a death.")):
        gauge(f"engine_{key}", text, {(name,): engine[key] for name, engine in engines.items()}, ("engine",))
    ready = {(name,): engine["state"] == "ready" for name, engine in engines.items()}
    gauge("engine_ready", "1 when the engine takes groups.", ready, ("engine",))
    return generate_latest(registry)
