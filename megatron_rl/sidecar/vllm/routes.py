"""Our own routes beside those of a vLLM server.

- A group takes one binary message each way, with its numbers as arrays. vLLM's own route answers with JSON: an object
  with names and text for every token. A small model samples faster than this is written and read. Here a token is four
  bytes and its log-prob four more, as the engine gave them.
- A pause returns as soon as no request is in flight. vLLM's own route then also sleeps, for callers that read their
  answers elsewhere. Until the engine resumes, vLLM 0.33 refuses groups and the answer is 503; an older vLLM keeps them.
  A pause clears no cache: nothing is computed before the commit, which resets the prefix cache. A reset visits every
  block of the cache, so two of them would take most of the time of a small publish.
- A commit resets the prefix cache and names the loaded weights. The answer says which name is then kept, and what the
  workers hold. A vLLM before 0.32 cannot keep this name, so it is kept here. Such a vLLM does not record either which
  weights sampled a token; `ServedWeights` proves it.
- A call for a group may resume the engine, and is then its first.
- A method of our extension is called in all workers without JSON.

vLLM loads `Routes` by its flag --middleware. This module is imported by the server's process and by the sidecar.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from megatron_rl.shared.protocol.wire import encode_experts
from megatron_rl.sidecar.vllm.scheduler import holds_outputs

GENERATE = "/megatron_rl/generate"
PAUSE = "/megatron_rl/pause"
END = "/megatron_rl/end"
COMMIT = "/megatron_rl/commit"
WORKERS = "/megatron_rl/workers"
MIDDLEWARE = f"{__name__}.Routes"
CUT = "abort"
"""vLLM's finish reason of a response that was cut."""

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


@dataclasses.dataclass
class ServedWeights:
    """The weights of this server, which only requests to it change.

    It proves which weights sampled a response if vLLM does not record that. No request that might change the weights
    may be open when the response begins, and none may come before the response is complete. Then the weights that were
    committed before have sampled it. The engine must have no other server.
    """

    tag: str = ""
    """The tag of the committed weights; empty from the next pause on, because they then belong to no version."""
    adapters: str = ""
    """The name of the committed adapters, which requests must name; empty for whole weights."""
    num_begun: int = 0
    """The number of requests so far that might change the weights."""
    num_ended: int = 0

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Count a request that may change the weights in this context."""
        self.num_begun += 1
        try:
            yield
        finally:
            self.num_ended += 1

    def prove(self, tag: str, num_begun: int, num_tokens: int) -> "list[GroupSpan] | None":
        """Return the span of a whole response; None if its weights are not proved.

        `tag` and `num_begun` are those of the moment when the response began.
        """
        is_proved = num_begun == self.num_begun == self.num_ended
        return [GroupSpan(tag, 0, num_tokens)] if is_proved else None


Route = Callable[[Any, ServedWeights, bytes], Awaitable[Any]]
"""A function of vLLM's client of its engine, the server's weights and a request's body; it returns the answer."""


class AdaptersName(msgspec.Struct, frozen=True):
    """The adapters of one version; no other version's have its name, because vLLM's prefix cache is keyed by it."""

    name: str
    number: int
    """The name in the workers."""


class GroupCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request to sample a group."""

    request_id: str
    prompt: bytes
    """The token ids, as little-endian int32."""
    sampling: dict[str, Any]
    """The fields of vLLM's SamplingParams."""
    cache_salt: str
    adapters: AdaptersName | None = None
    """The adapters to sample with; None for the model alone."""
    resumes: bool = False
    """True if it ends a pause."""


class GroupSpan(msgspec.Struct, frozen=True):
    """The tokens [start, end), which the weights with this tag sampled."""

    version: str
    start: int
    end: int


class GroupChoice(msgspec.Struct, frozen=True):
    """One response, as vLLM gave it."""

    index: int
    finish_reason: str | None
    tokens: bytes
    """Little-endian int32."""
    log_prob_tokens: bytes
    """The tokens that `log_probs` belong to, as vLLM lists them: they must equal `tokens`."""
    log_probs: bytes
    """Little-endian float32."""
    spans: list[GroupSpan] | None
    """The spans that vLLM recorded, or one for the whole response if `ServedWeights` proves it; None if not known."""
    experts: bytes | None = None
    """The experts of each token but the last, as `encode_experts` encodes them; None if this vLLM gives none."""


class WorkersCall(msgspec.Struct, frozen=True):
    """A call of a method of our extension in every worker."""

    method: str
    arguments: list[str]


class Commit(msgspec.Struct, frozen=True):
    """The name of the loaded weights."""

    tag: str
    adapters: str = ""
    """The name of the adapters among them; empty for whole weights."""


class Committed(msgspec.Struct, frozen=True):
    """The state of an engine after a commit."""

    tag: str
    """The name that its server keeps."""
    workers: list[dict[str, Any]]
    """The report of each of its workers."""
    is_reset: bool
    """True if its prefix cache was reset."""


class Cut(msgspec.Struct, frozen=True):
    """A request to end the responses of another request where they are."""

    request_id: str


class GroupAnswer(msgspec.Struct, frozen=True):
    """A server's answer to a group."""

    choices: list[GroupChoice]
    prompt_log_prob_tokens: bytes = b""
    """The tokens that `prompt_log_probs` belong to: the prompt's from the second on, if the call asked for them."""
    prompt_log_probs: bytes = b""
    """Little-endian float32."""
    prompt_experts: bytes | None = None
    """The experts of the prompt's tokens, as the first response had them."""
    adapters: str = ""
    """The name of the adapters that vLLM sampled with; empty for the model alone."""


class Routes:
    """An ASGI middleware of vLLM's server: it answers POSTs to our routes and passes on everything else."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._held = ServedWeights()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        route = _ROUTES.get(scope["path"]) if scope["type"] == "http" else None
        if route is None:
            reads = scope["type"] != "http" or scope["method"] in ("GET", "HEAD")
            with contextlib.nullcontext() if reads else self._held.changing():
                await self._app(scope, receive, send)
            return
        body = await _read_body(receive)
        answering = asyncio.ensure_future(_answer(route, scope["app"].state.engine_client, self._held, body))
        leaving = asyncio.ensure_future(_until_disconnected(receive))
        try:
            # If the client leaves, cancelling makes vLLM abort the request.
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not answering.done():
                answering.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await answering
        if answering.cancelled():
            return
        status, content = answering.result()
        headers = [(b"content-type", b"application/msgpack"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})


async def _answer(route: Route, client: Any, held: ServedWeights, body: bytes) -> tuple[int, bytes]:
    """Return status and body of the answer; if vLLM refuses, the body is vLLM's error."""
    try:
        answer = await route(client, held, body)
    except (ValueError, TypeError) as error:
        return 400, f"{type(error).__name__}: {error}".encode()
    except Exception as error:
        # vLLM's errors have a status of their own if the same request may be sent again.
        status = 503 if getattr(error, "status_code", None) == 503 else 500
        return status, f"{type(error).__name__}: {error}".encode()
    return 200, msgspec.msgpack.encode(answer)


async def _generate(client: Any, held: ServedWeights, body: bytes) -> GroupAnswer:
    call = msgspec.msgpack.decode(body, type=GroupCall)
    if call.resumes:
        with held.changing():
            await client.resume_generation()
    tag, num_begun = held.tag, held.num_begun
    named = "" if call.adapters is None else call.adapters.name
    if named != held.adapters:
        raise ValueError(
            f"the request names {named or 'no adapters'}, and the engine holds {held.adapters or 'no adapters'}"
        )
    answer = await sample_group(client, call)
    choices = [
        choice
        if choice.spans is not None
        else msgspec.structs.replace(choice, spans=held.prove(tag, num_begun, len(choice.tokens) // 4))
        for choice in answer.choices
    ]
    return msgspec.structs.replace(answer, choices=choices)


async def _end(client: Any, _: ServedWeights, body: bytes) -> None:
    request_id = msgspec.msgpack.decode(body, type=Cut).request_id
    if not holds_outputs(client.vllm_config.scheduler_config.scheduler_cls):
        # vLLM answers an aborted request with the tokens that it has.
        await client.abort(request_id)
    elif ids := client.output_processor.external_req_ids.get(request_id):
        # The core has tokens that the front end has not: the core ends the responses, with all of them.
        await client.engine_core.abort_requests_async(list(ids))


async def _pause(client: Any, held: ServedWeights, _: bytes) -> None:
    core = client.engine_core
    pause = getattr(core, "pause_generation_async", None) or core.pause_scheduler_async
    await pause(mode="wait", clear_cache=False)
    held.tag = held.adapters = ""


async def _call_workers(client: Any, held: ServedWeights, body: bytes) -> list[dict[str, Any]]:
    call = msgspec.msgpack.decode(body, type=WorkersCall)
    with held.changing():
        answers: list[dict[str, Any]] = await client.collective_rpc(call.method, None, tuple(call.arguments))
        return answers


async def _commit(client: Any, held: ServedWeights, body: bytes) -> Committed:
    commit = msgspec.json.decode(body, type=Commit)
    with held.changing():
        # Prefixes that a connector of vLLM's stores outside the engine belong to the old weights too.
        asked = [client.reset_prefix_cache(False, True), client.collective_rpc("megatron_rl_report")]
        if hasattr(client, "update_weight_version"):
            # The core takes messages in the order in which they are sent, and does not wait for the answers to be read.
            asked += [client.update_weight_version(commit.tag), client.get_weight_version()]
        is_reset, workers, *tags = await asyncio.gather(*asked)
        held.tag, held.adapters = commit.tag, commit.adapters
        _forget_adapters(client)
    return Committed(tags[-1] if tags else commit.tag, workers, is_reset is True)


def _forget_adapters(client: Any) -> None:
    """Clear the metric that gets a time series for each name of adapters, as each version has one of its own."""
    manager = getattr(client, "logger_manager", None)
    for logger in () if manager is None else manager.stat_loggers:
        gauge = getattr(logger, "gauge_lora_info", None)
        if gauge is not None:
            gauge.clear()


_ROUTES: dict[str, Route] = {GENERATE: _generate, END: _end, PAUSE: _pause, COMMIT: _commit, WORKERS: _call_workers}


async def sample_group(client: Any, call: GroupCall) -> GroupAnswer:
    """Have vLLM's engine sample a group; all its responses come together."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    # Flat log-probs are lists of numbers; otherwise vLLM makes a dictionary and an object for every token.
    params = SamplingParams(**call.sampling, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY)
    prompt = {
        "prompt_token_ids": np.frombuffer(call.prompt, dtype="<i4").tolist(),
        "cache_salt": call.cache_salt,
    }
    (rendered,) = await client.renderer.render_cmpl_async([prompt])
    named = {} if call.adapters is None else {"lora_request": _request_adapters(call.adapters)}
    results = [result async for result in client.generate(rendered, params, call.request_id, **named)]
    sampled_with = getattr(results[-1], "lora_request", None)
    outputs, num_prompt = results[-1].outputs, len(prompt["prompt_token_ids"])
    return GroupAnswer(
        [_pack_choice(output, num_prompt) for output in outputs],
        *_pack(results[-1].prompt_logprobs),
        prompt_experts=_pack_experts(outputs[0], slice(num_prompt)) if outputs else None,
        adapters="" if sampled_with is None else sampled_with.lora_name,
    )


def _request_adapters(adapters: AdaptersName) -> Any:
    from vllm.lora.request import LoRARequest

    # A worker that does not hold them would load the path, so it must not be one.
    return LoRARequest(adapters.name, adapters.number, f"adapters {adapters.name} are not in this worker's slot")


def _pack_choice(output: Any, num_prompt: int) -> GroupChoice:
    tokens, log_probs = _pack(output.logprobs)
    spans = getattr(output, "weight_versions", None)
    return GroupChoice(
        index=output.index,
        finish_reason=output.finish_reason,
        tokens=np.asarray(output.token_ids, dtype="<i4").tobytes(),
        log_prob_tokens=tokens,
        log_probs=log_probs,
        spans=None if spans is None else [GroupSpan(span.version, span.start, span.end) for span in spans],
        experts=_pack_experts(output, slice(num_prompt, None)),
    )


def _pack_experts(output: Any, tokens: slice) -> bytes | None:
    """Return the experts of some of a response's tokens, which the prompt's precede."""
    experts = getattr(output, "routed_experts", None)
    return None if experts is None else encode_experts(np.asarray(experts)[tokens])


def _pack(flat: Any) -> tuple[bytes, bytes]:
    """Return the tokens of flat log-probs, and the log-probs themselves, as bytes; both are empty for None."""
    tokens, log_probs = (flat.token_ids, flat.logprobs) if flat else ((), ())
    return np.asarray(tokens, dtype="<i4").tobytes(), np.asarray(log_probs, dtype="<f4").tobytes()


async def _read_body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b""
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
