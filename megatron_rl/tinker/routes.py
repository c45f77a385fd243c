"""The routes of Tinker's interface, and how the front is opened beside a sidecar's service."""

import asyncio
import contextlib
import functools
import hashlib
import hmac
import logging
import os
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from megatron_rl.errors import InputError, MegatronRLError, UsageError
from megatron_rl.shared.chat import read_tokenizer
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.hosts import is_loopback, parse_place
from megatron_rl.shared.records.append_file import write_private
from megatron_rl.shared.records.audit_events import FILE_NAME as AUDIT_FILE
from megatron_rl.sidecar.group_maker import Samplers
from megatron_rl.sidecar.main import AddRoutes
from megatron_rl.sidecar.serving import find_url, open_listener, serve
from megatron_rl.sidecar.settings import SidecarSettings
from megatron_rl.tinker import ADDRESS_FILE, KEY_FILE, protobuf, work
from megatron_rl.tinker.front import Front, Served, derive_seed
from megatron_rl.tinker.provenance import SequenceRecord
from megatron_rl.tinker.ranks import Ranks
from megatron_rl.tinker.requests import HANDLERS, RequestFile, Requests, begun, read_text, read_whole
from megatron_rl.tinker.sampling import Decode, Wanted
from megatron_rl.tinker.saved import NotFound, describe_saved

_log = logging.getLogger(__name__)
KEYS_VARIABLE = "MEGATRON_RL_SERVE_KEYS"
LAST_ADDRESS_FILE, CONFIG_FILE = "serve-port", "config.json"
_MOST_BYTES = 1 << 28
_MOST_SAMPLES = 4096
_POLL_SECONDS = 30.0
_CLIENT_CONFIG = {"use_pyqwest_transport": False, "parallel_fwdbwd_chunks": False}
_NOT_SERVED = {
    "create_custom_loss": "losses of a server's own",
    "save_weights_external": "weights of others",
    "auth/token": "tokens in place of keys",
    "retrieve_futures": "many futures at once",
}


FindOwner = Callable[[Request], str]
Read = Callable[[Request], Awaitable[tuple[str, dict[str, Any]]]]


class _Keys:
    def __init__(self, keys: list[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def find_owner(self, request: Request) -> str:
        """Return the name of a request's key, which tells nothing about it."""
        sent = request.headers.get("x-api-key", "").encode()
        if not [key for key in self._keys if hmac.compare_digest(key, sent)]:
            raise _Unauthorized("the key is missing or wrong: write it into TINKER_API_KEY")
        return hashlib.sha256(sent).hexdigest()[:12]


class _Unauthorized(MegatronRLError):
    """A request without a key of this service."""


def build_application(front: Front, requests: Requests, keys: list[str]) -> FastAPI:
    app = FastAPI(title="megatron_rl by Tinker's interface", docs_url=None, redoc_url=None, openapi_url=None)
    find_owner = _Keys(keys).find_owner

    async def report(_: Request, error: Exception) -> Response:
        status = next((code for kind, code in ((_Unauthorized, 401), (NotFound, 404)) if isinstance(error, kind)), 400)
        return JSONResponse({"error": str(error), "detail": str(error)}, status_code=status)

    for kind in (MegatronRLError, ValueError, TypeError, KeyError, OverflowError):
        app.add_exception_handler(kind, report)

    async def read(request: Request) -> tuple[str, dict[str, Any]]:
        owner = find_owner(request)
        body = await _read_body(request)
        try:
            return owner, msgspec.json.decode(body or b"{}", type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise InputError(f"the body is not a JSON object: {error}") from None

    for path in HANDLERS.keys() - {"finish"}:
        _add_request(app, path, requests, find_owner)
    _session_routes(app, front, requests, read)
    _sampling_routes(app, front, find_owner, read)
    _checkpoint_routes(app, front, find_owner, read)

    @app.post("/api/v1/retrieve_future")
    async def retrieve(request: Request) -> Response:
        owner, body = await read(request)
        future = front.futures.find(read_text(body, "request_id"), owner)
        if future is None:
            # A client samples again, and tells its user of anything else.
            return JSONResponse({"error": f"this service knows no request {body['request_id']}"}, status_code=410)
        try:
            async with asyncio.timeout(_POLL_SECONDS):
                await future.done.wait()
        except TimeoutError:
            again = {"type": "try_again", "request_id": future.identity, "queue_state": "active"}
            return JSONResponse(again, status_code=408)
        assert future.answer is not None
        return Response(future.answer.body, media_type=future.answer.media_type)

    for path, what in _NOT_SERVED.items():
        _refuse(app, path, what)
    return app


def _refuse(app: FastAPI, path: str, what: str) -> None:
    @app.post(f"/api/v1/{path}", name=path)
    async def refuse() -> Response:
        return JSONResponse({"error": f"{what} ({path}) are not served here"}, status_code=404)


def _session_routes(app: FastAPI, front: Front, requests: Requests, read: Read) -> None:
    @app.get("/api/v1/healthz")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/api/v1/client/config")
    async def configure(request: Request) -> dict[str, Any]:
        await read(request)
        return _CLIENT_CONFIG

    @app.post("/api/v1/telemetry")
    async def telemetry(request: Request) -> dict[str, str]:
        await read(request)
        return {"status": "accepted"}

    @app.get("/api/v1/get_server_capabilities")
    async def capabilities(request: Request) -> dict[str, Any]:
        await read(request)
        served = front.served
        model = {"model_name": served.base_model, "max_context_length": served.longest}
        return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}

    @app.post("/api/v1/session_heartbeat")
    async def beat(request: Request) -> dict[str, Any]:
        owner, body = await read(request)
        front.find_session(read_text(body, "session_id"), owner)
        return {}

    @app.post("/api/v1/sessions/{session}/finish")
    async def finish(request: Request, session: str) -> dict[str, Any]:
        owner, _ = await read(request)
        if not front.has_session(session, owner):
            # A client asks again if the answer was lost.
            return {}
        return requests.take("finish", owner, "", msgspec.json.encode({"session_id": session}))

    @app.post("/api/v1/get_info")
    async def get_info(request: Request) -> dict[str, Any]:
        owner, body = await read(request)
        model, served = front.find_model(read_text(body, "model_id"), owner), front.served
        adapters = {"is_lora": True, "lora_rank": served.lora_rank} if served.lora_rank else {"is_lora": False}
        data = {"model_name": served.base_model, "tokenizer_id": served.base_model}
        return {"model_id": model.identity, "model_data": data, "model_name": served.base_model, **adapters}


def _add_request(app: FastAPI, path: str, requests: Requests, find_owner: FindOwner) -> None:
    @app.post(f"/api/v1/{path}", name=path)
    async def take(request: Request) -> dict[str, Any]:
        owner, body = find_owner(request), await _read_body(request)
        return requests.take(path, owner, request.headers.get("x-idempotency-key", ""), body)


def _sampling_routes(app: FastAPI, front: Front, find_owner: FindOwner, read: Read) -> None:
    @app.get("/api/v1/samplers/{identity}")
    async def sampler(request: Request, identity: str) -> dict[str, Any]:
        found = front.find_sampler(identity, find_owner(request))
        path = {} if found.path is None else {"model_path": found.path}
        return {"sampler_id": identity, "base_model": front.served.base_model, **path}

    @app.post("/api/v1/asample")
    async def asample(request: Request) -> dict[str, Any]:
        owner, body = await read(request)
        sampler = front.find_sampler(read_text(body, "sampling_session_id"), owner)
        number = read_whole(body, "seq_id")
        wanted = _read_wanted(body, sampler.identity, number, front.served.longest)
        future, names = front.sample(sampler, number, wanted, bool(body.get("prompt_logprobs")))
        return begun(future, sample_sequence_ids=names)


def _checkpoint_routes(app: FastAPI, front: Front, find_owner: FindOwner, read: Read) -> None:
    @app.post("/api/v1/weights_info")
    async def weights_info(request: Request) -> dict[str, Any]:
        owner, body = await read(request)
        one = front.saved.find(read_text(body, "tinker_path"), owner)
        rank = {"lora_rank": one.lora_rank} if one.lora_rank else {}
        return {"base_model": one.base_model, "is_lora": bool(one.lora_rank), **rank}

    @app.get("/api/v1/training_runs")
    async def training_runs(request: Request, limit: int = 20, offset: int = 0) -> dict[str, Any]:
        owner = find_owner(request)
        names = dict.fromkeys([one.model for one in front.saved.list_of(owner)])
        names |= dict.fromkeys([one.identity for one in front.list_models(owner)])
        cursor = {"offset": offset, "limit": limit, "total_count": len(names)}
        picked = [*names][offset : offset + limit]
        return {"training_runs": [front.describe_run(name, owner) for name in picked], "cursor": cursor}

    @app.get("/api/v1/training_runs/{run}")
    async def training_run(request: Request, run: str) -> dict[str, Any]:
        return front.describe_run(run, find_owner(request))

    @app.get("/api/v1/training_runs/{run}/checkpoints")
    async def of_run(request: Request, run: str) -> dict[str, Any]:
        found = front.saved.list_of(find_owner(request), run)
        return {"checkpoints": [describe_saved(one) for one in found]}

    @app.get("/api/v1/checkpoints")
    async def checkpoints(request: Request, limit: int = 100, offset: int = 0) -> dict[str, Any]:
        found = front.saved.list_of(find_owner(request))
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return {
            "checkpoints": [describe_saved(one) for one in found[offset : offset + limit]],
            "cursor": cursor,
        }

    @app.put("/api/v1/training_runs/{run}/checkpoints/{checkpoint:path}/ttl")
    async def set_ttl(request: Request, run: str, checkpoint: str) -> dict[str, Any]:
        owner, body = await read(request)
        front.saved.set_expiry(front.saved.find(f"tinker://{run}/{checkpoint}", owner), body.get("ttl_seconds"))
        return {}

    @app.delete("/api/v1/training_runs/{run}/checkpoints/{checkpoint:path}")
    async def delete(request: Request, run: str, checkpoint: str) -> dict[str, Any]:
        await front.delete_checkpoint(front.saved.find(f"tinker://{run}/{checkpoint}", find_owner(request)))
        return {}


async def _read_body(request: Request) -> bytes:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > _MOST_BYTES:
            raise InputError(f"a body must have at most {_MOST_BYTES} bytes: send fewer data at a time")
    return bytes(data)


def _read_wanted(body: Mapping[str, Any], sampler: str, number: int, longest: int) -> Wanted:
    params = body.get("sampling_params") or {}
    usual = {"top_k": (-1, 0, 1), "top_p": (1, 1.0)}
    for name, values in usual.items():
        if params.get(name, values[0]) not in values:
            raise InputError(f"{name} {params[name]} is not served: what is sampled must be the policy's distribution")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k"):
        if body.get(name):
            raise InputError(f"{name} is not served: prompt_logprobs is")
    tokens: list[int] = []
    for chunk in (body.get("prompt") or {}).get("chunks", []):
        if chunk.get("type") != "encoded_text":
            raise InputError(f"only chunks of tokens are served, not {chunk.get('type')}")
        tokens += chunk["tokens"]
    stop, seed, most = params.get("stop"), params.get("seed"), params.get("max_tokens")
    if not 1 <= (body.get("num_samples") or 1) <= _MOST_SAMPLES or (most is not None and most < 1):
        raise InputError(f"num_samples must be 1 to {_MOST_SAMPLES}, and max_tokens at least 1")
    if stop == "" or (isinstance(stop, list) and "" in stop):
        raise InputError("a stop must have a character")
    return Wanted(
        prompt=np.asarray(tokens, "<i4"),
        num_samples=body.get("num_samples") or 1,
        seed=derive_seed(sampler, number) if seed is None else int(seed),
        max_tokens=longest if most is None else int(most),
        # One token to choose from is the likeliest.
        temperature=0.0 if params.get("top_k") == 1 else float(params.get("temperature", 1.0)),
        stop=[stop] if isinstance(stop, str) else stop,
    )


def _add_work_routes(ranks: Ranks, app: FastAPI, renew: Callable[[Request], None]) -> None:
    """Add the routes of the ranks to the sidecar's own application, which checks their token."""

    @app.get("/v1/work")
    async def take(request: Request, patience: float = 30.0) -> Response:
        """Answer with the next piece of work; 204 if none comes within `patience` seconds."""
        renew(request)
        assigned = await ranks.take(min(patience, _POLL_SECONDS))
        if assigned is None:
            return Response(status_code=204)
        return Response(msgspec.msgpack.encode(assigned), media_type=wire.MEDIA_TYPE)

    @app.post("/v1/work/{number}")
    async def give(request: Request, number: int) -> dict[str, int]:
        renew(request)
        ranks.give(number, work.RESULT.decode(await request.body()))
        return {"number": number}


def read_keys(path: Path | None, folder: Path) -> list[str]:
    """Read the clients' keys from a file or the environment; without them one is made, and kept in the folder."""
    text = os.environ.get(KEYS_VARIABLE, "") if path is None else path.read_text()
    keys = text.split()
    if not keys:
        own = folder / KEY_FILE
        if not own.exists():
            write_private(own, f"tml-{secrets.token_hex(24)}\n".encode())
        keys = own.read_text().split()
    if wrong := [number for number, key in enumerate(keys) if not key.startswith(("tml-", "eyJ")) or len(key) < 20]:
        raise InputError(
            f"key {wrong[0]} must begin with tml- and have at least 20 characters: Tinker's client asks so"
        )
    return keys


def _open_listener(place: tuple[str, int], last: Path) -> socket.socket:
    """Listen where clients of the service's last life look for it, if the port may be chosen."""
    if place[1] == 0 and last.exists():
        with contextlib.suppress(UsageError):
            return open_listener(place[0], int(last.read_text()), "--serve-listen")
    listener = open_listener(*place, "--serve-listen")
    write_private(last, str(listener.getsockname()[1]).encode())
    return listener


def _name_model(served: Served, folder: Path) -> str:
    """Name what requests were computed with: the model, its configuration, and the rank of adapters."""
    digest = hashlib.sha256((folder / CONFIG_FILE).read_bytes()).hexdigest()[:12]
    return f"{served.base_model} ({digest}, adapters of rank {served.lora_rank})"


def _find_last_version(path: Path) -> int:
    lines = path.read_bytes().splitlines() if path.exists() else []
    # The first line begins the log, and a torn one may end it.
    found = (re.search(rb'"version":(\d+)', line) for line in lines)
    return max((int(one[1]) for one in found if one is not None), default=0)


async def open_front(
    settings: SidecarSettings, engines: Samplers, _: Decode, stack: contextlib.AsyncExitStack
) -> AddRoutes:
    """Open Tinker's interface until the stack ends; return what adds the routes of the ranks."""
    serving = settings.serve
    assert serving is not None and settings.hf_model is not None
    folder, longest = settings.folder, settings.rollout.max_model_len or settings.seq_length
    assert longest is not None
    protobuf.load_messages()
    # Texts that stop a sequence may be special tokens.
    tokenizer = await asyncio.to_thread(read_tokenizer, str(settings.hf_model))
    served = Served(
        base_model=serving.base_model or settings.hf_model.resolve().name,
        folder=folder,
        longest=longest,
        lora_rank=settings.lora_rank,
        most_models=serving.most_models,
        needs_provenance=serving.needs_provenance,
        last_version=_find_last_version(folder / AUDIT_FILE),
        decode=functools.partial(tokenizer.batch_decode, skip_special_tokens=False),
    )
    record = SequenceRecord(folder)
    stack.callback(record.close)
    ranks = Ranks()
    place = parse_place(serving.listen)
    assert place is not None
    listener, ended = _open_listener(place, folder / LAST_ADDRESS_FILE), asyncio.Event()
    journal = RequestFile(folder, _name_model(served, settings.hf_model))
    stack.callback(journal.close)
    front = Front(served, ranks, engines, record, journal.note)
    requests = Requests(front, journal)
    requests.replay()
    app = build_application(front, requests, read_keys(serving.keys_file, folder))
    task = asyncio.create_task(serve(app, listener=listener, until=ended, tls=serving.tls))

    async def end() -> None:
        ended.set()
        await task

    stack.push_async_callback(end)
    url = find_url(listener, "http" if serving.tls is None else "https")
    if serving.tls is None and not is_loopback(place[0]):
        _log.warning("clients reach %s without encryption, keys included: write --serve-tls-cert and its key", url)
    write_private(folder / ADDRESS_FILE, f"{url}\n".encode())
    stack.callback((folder / ADDRESS_FILE).unlink, missing_ok=True)
    return functools.partial(_add_work_routes, ranks)
