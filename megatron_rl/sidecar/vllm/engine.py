"""A vLLM server as an engine: requests go to its unix socket, and weights are replaced in place."""

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from megatron_rl.errors import PlatformError
from megatron_rl.shared.protocol import probe
from megatron_rl.shared.protocol.wire import (
    Drafts,
    EngineKind,
    Response,
    Sampling,
    Way,
    Weights,
    decode_log_probs,
    encode_tokens,
)
from megatron_rl.sidecar import streams
from megatron_rl.sidecar.attempts import Pace
from megatron_rl.sidecar.engines import (
    EngineBusy,
    EngineHost,
    EngineLost,
    EngineRefused,
    EngineState,
    GroupRequest,
    ProbeReport,
    WeightReport,
    WeightsNotWritten,
    WrongWeights,
)
from megatron_rl.sidecar.engines.hosts import OWN_HOST
from megatron_rl.sidecar.launcher import Handle
from megatron_rl.sidecar.vllm.answers import Limits, build_call, find_wrongly_shared, read_responses
from megatron_rl.sidecar.vllm.connection import Connection, CoreProgress, DraftMeter, Workers
from megatron_rl.sidecar.vllm.parts import encode_places
from megatron_rl.sidecar.vllm.patches import NOT_APPLIED
from megatron_rl.sidecar.vllm.routes import (
    COMMIT,
    END,
    GENERATE,
    MIDDLEWARE,
    PAUSE,
    AdaptersName,
    Commit,
    Committed,
    Cut,
    GroupAnswer,
    GroupCall,
)
from megatron_rl.sidecar.vllm.server import COMPILATION_FLAG, EXPERTS_FLAG, EXTENSION, PLAIN_ROTATION
from megatron_rl.sidecar.vllm.server_log import describe_start, measure_server
from megatron_rl.sidecar.vllm.updates import FROM_FILES, Updates

_log = logging.getLogger(__name__)

NoteStart = Callable[[str, Mapping[str, float]], object]
"""Gets an engine's name, and the seconds of the parts of its start."""

_LOG_PROBS_MODE = "processed_logprobs"
_POLL_SECONDS = 0.1
_LEAST_SECONDS_BETWEEN_POLLS = 0.005
"""The same for all engines together that are asked whether they are ready."""


@dataclasses.dataclass(frozen=True)
class Deadlines:
    """Deadlines in seconds; those of the steps of a publish are in `publication.StepDeadlines`.

    The deadlines of a start and of a silence become shorter once some have been measured (`attempts.Pace`).
    """

    start: float = 600
    health: float = 60
    """Seconds for a health check: long, because a server that writes the answer to a large group does nothing else."""
    group: float = 7200
    """Seconds for a whole group, including the time in the queue."""
    stall: float = 120
    """The most seconds without progress while a request is in flight."""


# Longer than the least of a publish's step: a step of a core may take long on a busy host.
LEAST_SECONDS = 60.0


class VllmEngine:
    """One vLLM server, started by us (with a handle) or adopted. Satisfies `sidecar.engines.Engine`."""

    def __init__(
        self,
        name: str,
        address: str,
        handle: Handle | None = None,
        deadlines: Deadlines = Deadlines(),
        pace: Pace | None = None,
        note_start: NoteStart = lambda name, seconds: None,
        scoring: Literal["ours", "vllm"] = "ours",
        replays_routing: bool = False,
        host: EngineHost = OWN_HOST,
    ) -> None:
        """Make an engine; `pace` has the measured starts and silences of all engines like this one.

        `note_start` gets the seconds of the parts of its start. `scoring` says whose kernel computes the log-probs of
        sampled tokens on GPUs. With `replays_routing`, groups that are trained on have the experts of their tokens.
        """
        self.name = name
        self.address = address
        self.host = host
        self.state = EngineState.STARTING
        self.limits = Limits(max_model_len=0, max_num_seqs=0, vocab_size=0)
        self.facts: dict[str, Any] = {}
        self.stream_place: streams.StreamPlace | None = None
        self._handle = handle
        self._deadlines = deadlines
        self._version = -1
        self._tag = ""
        self._has_adapters = False
        self._is_asleep = False
        self._num_in_flight = 0
        self._waits_for = ""
        """The other processes that a step waits for, or waited for until its deadline; empty if there are none."""
        self._updates: Updates | None = None
        self._progress = CoreProgress()
        self._pace = pace or Pace(LEAST_SECONDS)
        self._note_start = note_start
        self._scoring = scoring
        self._replays_routing = replays_routing
        self._connection = Connection(name, host.connect(address, handle is not None), handle, deadlines.health)
        self._workers = Workers(name, self._connection)
        self._drafts = DraftMeter(name, self._connection)

    async def start(self) -> None:
        """Wait until the server answers and its workers are ready; else raise EngineLost with its last lines."""
        begun = time.monotonic()
        seconds = self._pace.deadline("start", self._deadlines.start)
        try:
            async with asyncio.timeout(seconds):
                await self._until_healthy()
                answered = time.monotonic()
                await self._prepare()
                self._updates = Updates(self.name, self.facts, self._connection, self._workers, self.probe)
                await self._updates.check(is_started_here=self._handle is not None)
        except TimeoutError:
            self._pace.note("start", seconds)
            raise EngineLost(f"engine {self.name} was not ready after {seconds:.3g} s\n{self.last_words()}") from None
        ended = time.monotonic()
        self._pace.note("start", ended - begun)
        if self._handle:
            # The numbers of processes on another host mean nothing here.
            server = measure_server(int(self.facts["pid"])) if self.host is OWN_HOST else 0.0
            log = self._handle.log_lines()
            self._note_start(self.name, describe_start(answered - begun, server, ended - answered, log))
        self.state = EngineState.WAITING

    async def generate(self, request: GroupRequest) -> list[Response]:
        if self.state is not EngineState.READY:
            # A paused vLLM would keep the request and sample it from the next weights.
            raise EngineRefused(f"engine {self.name} is {self.state}: it takes no groups")
        version, tag = self._version, self._tag
        call = build_call(request, self.limits, tag, self._adapters)
        if not self._num_in_flight:
            self._progress.begin()
        self._num_in_flight += 1
        try:
            async with asyncio.timeout(self._deadlines.group), self._cutting(request):
                answer = await self._sample(call)
            self._must_be_sampled_as_named(answer, call)
        except TimeoutError:
            raise EngineLost(
                f"engine {self.name}: request {request.request_id} was not finished after {self._deadlines.group:g} s"
            ) from None
        finally:
            self._num_in_flight -= 1
            if not self._num_in_flight and self._progress.longest:
                self._pace.note("silence", self._progress.longest)
        has_experts = self._replays_routing and not request.can_wait
        return read_responses(answer, request, self.name, version, tag, has_experts)

    @contextlib.asynccontextmanager
    async def _cutting(self, request: GroupRequest) -> AsyncIterator[None]:
        """Tell the server when the request must be cut; the server then answers with the tokens that it has."""
        if request.cut is None:
            yield
            return

        async def cut(event: asyncio.Event) -> None:
            await event.wait()
            # If the server is lost, the request itself reports it.
            with contextlib.suppress(EngineLost):
                try:
                    await self._connection.send("cut", END, msgspec.msgpack.encode(Cut(request.request_id)))
                except EngineRefused as refusal:
                    _log.warning("%s; request %s is sampled to its end", refusal, request.request_id)

        task = asyncio.create_task(cut(request.cut))
        try:
            yield
        finally:
            task.cancel()

    async def pause(self) -> None:
        self.state = EngineState.PUBLISHING
        await self._connection.send("pause", PAUSE)
        if self.facts.get("has_drafts"):
            await self._drafts.end_version(self._version)

    async def sleep(self) -> None:
        await self.pause()
        self._version, self._tag = -1, ""
        self._is_asleep = True
        await self._workers("sleep", "megatron_rl_sleep")
        self.state = EngineState.WAITING

    async def count_drafts(self) -> Drafts | None:
        return await self._drafts.count() if self.facts.get("has_drafts") else None

    async def reach(self, weights: Weights) -> None:
        host, port = streams.split_address(weights.stream)
        await self._workers("reach", "megatron_rl_reach", host, str(port))

    async def load(self, weights: Weights) -> WeightReport:
        self.state = EngineState.DIRTY
        # Until the next commit, the tokens that it samples belong to no version.
        self._version, self._tag, self._has_adapters = -1, "", bool(weights.base)
        if self._is_asleep:
            await self._workers("load", "megatron_rl_wake", "weights")
        answers = await (self._load_stream(weights) if weights.is_streamed else self._load_files(weights))
        if weights.is_streamed:
            way: Way = "stream"
        else:
            # Files if any worker read some.
            way = "ipc" if all(answer["through"] == "ipc" for answer in answers) else "files"
        if wrong := sorted(set(find_wrongly_shared(answers))):
            if way == "files":
                # If the files are wrong, the engine is not.
                places = await self.host.find_weights(weights)
                await self._workers("load", "megatron_rl_check_files", encode_places(places), *wrong)
            raise WrongWeights(
                f"engine {self.name}, load: {len(wrong)} tensors, divided over its workers, do not hold the numbers "
                f"that were given: {', '.join(wrong[:5])}"
            )
        # Tensors that no worker holds were not compared either.
        unheld = set.intersection(*(set(answer["unheld"]) for answer in answers))
        uncompared = {name for answer in answers for name in answer["uncompared"]}
        return WeightReport(
            weights.version,
            self._workers.get_common("load", answers, "fingerprint"),
            num_compared=min(answer["compared"] for answer in answers),
            num_parameters=max(answer["parameters"] for answer in answers) + len(unheld),
            uncompared=tuple(sorted(uncompared | unheld)),
            quantization=self.facts.get("quantization", ""),
            through=way,
            reasons=tuple(dict.fromkeys(reason for answer in answers for reason in answer.get("reasons", ()))),
        )

    async def commit(self, report: WeightReport) -> WeightReport:
        tag = f"{report.version}:{report.fingerprint}"
        if self._is_asleep:
            await self._workers("commit", "megatron_rl_wake", "kv_cache")
            self._is_asleep = False
        data = await self._connection.send("commit", COMMIT, Commit(tag, tag if self._has_adapters else ""))
        held = msgspec.msgpack.decode(data, type=Committed)
        if not held.is_reset:
            raise EngineRefused(
                f"engine {self.name}: its prefix cache was not reset: a request still uses it, or a connector of "
                "vLLM's has kept its own"
            )
        self._version, self._tag = report.version, tag
        self.state = EngineState.PUBLISHING
        version, _, fingerprint = held.tag.partition(":")
        of_workers = self._workers.get_common("commit", self._workers.check("commit", held.workers), "fingerprint")
        if of_workers != fingerprint or not version.isdecimal():
            raise EngineRefused(
                f"engine {self.name} is tagged {held.tag!r}, but its workers hold the weights of fingerprint "
                f"{of_workers!r}"
            )
        return WeightReport(int(version), fingerprint)

    async def probe(self, tokens: Sequence[int]) -> ProbeReport:
        chosen = tokens or probe.draw_tokens(max(0, self._version), self.limits.vocab_size)
        prompt = tuple(chosen[: self.limits.max_model_len - 1])
        request = GroupRequest(f"probe-{self.name}-{self._version}", prompt, 1, 0, Sampling(max_tokens=1))
        call = build_call(request, self.limits, f"probe {time.monotonic_ns()}", self._adapters)
        call = msgspec.structs.replace(call, sampling={**call.sampling, "prompt_logprobs": 0}, resumes=True)
        answer = await self._ask("probe", call)
        self._must_be_sampled_as_named(answer, call)
        if answer.prompt_log_prob_tokens != encode_tokens(prompt[1:]):
            raise EngineRefused(f"engine {self.name}, probe: its log-probs belong to other tokens than the probe's")
        log_probs = decode_log_probs(answer.prompt_log_probs).tolist()
        if not all(map(math.isfinite, log_probs)):
            # Another attempt would give the same log-probs.
            raise WrongWeights(
                f"engine {self.name}: its log-probs of the probe are not finite: the weights are damaged"
            )
        (response,) = read_responses(answer, request, self.name, self._version, self._tag)
        return ProbeReport(log_probs, response)

    async def watch(self) -> None:
        """Begin to record what the model's parts compute; its workers must be those of `watching.EXTENSION`."""
        await self._workers("watch", "megatron_rl_watch")

    async def write_recording(self, folder: Path) -> None:
        """Write what was recorded since, a file for each worker."""
        await self._workers("watch", "megatron_rl_write_recording", str(folder))

    async def answer(self, request: GroupRequest) -> list[Response]:
        """Sample with the weights that it was started with, which no version has."""
        call = msgspec.structs.replace(build_call(request, self.limits, "", self._adapters), resumes=True)
        return read_responses(await self._sample(call), request, self.name, self._version, self._tag)

    def open(self) -> None:
        self.state = EngineState.READY

    async def find_fault(self) -> str | None:
        """Return why the engine is lost; None while its processes run, it answers, and it makes progress."""
        if self._connection.fault is None and not await self._connection.is_healthy():
            return await self._explain_silence()
        return self._connection.fault or await self._find_stall()

    async def close(self) -> None:
        """End the engine, unless it was adopted."""
        self.state = EngineState.DEAD
        await self._connection.close()
        if self._handle:
            await asyncio.to_thread(self._handle.kill)

    @property
    def kind(self) -> EngineKind:
        facts = self.facts
        named = {name: facts[name] for name in ("dtype", "device", "has_experts")}
        return EngineKind(**named, is_quantized=bool(facts["quantization"]))

    @property
    def _adapters(self) -> AdaptersName | None:
        """The adapters of the version that it holds; None if it holds whole weights, or no version."""
        return AdaptersName(self._tag, self._version + 1) if self._has_adapters and self._tag else None

    def _must_be_sampled_as_named(self, answer: GroupAnswer, call: GroupCall) -> None:
        """Raise unless the adapters that the call names sampled the answer."""
        named = "" if call.adapters is None else call.adapters.name
        if answer.adapters != named:
            raise EngineRefused(
                f"engine {self.name}: request {call.request_id} was sampled with {answer.adapters or 'no adapters'}, "
                f"and names {named or 'none'}"
            )

    @property
    def num_workers(self) -> int:
        return int(self.facts["world_size"])

    def last_words(self) -> str:
        """Describe what is known about its end, or about a step that did not end in time."""
        return "\n".join(filter(None, [self._waits_for, self._connection.last_words()]))

    async def _prepare(self) -> None:
        try:
            answers = await self._workers("prepare", "megatron_rl_prepare", self._scoring)
        except EngineRefused as refusal:
            raise EngineRefused(
                f"{refusal}\nAn engine needs VLLM_SERVER_DEV_MODE=1, this package on its PYTHONPATH, "
                f"--enable-scale-out, --logprobs-mode {_LOG_PROBS_MODE}, --middleware {MIDDLEWARE} and "
                f"--worker-extension-cls {EXTENSION}"
            ) from None
        self.facts = facts = answers[0]
        if self._handle:
            self._handle.need([int(answer["pid"]) for answer in answers])
        if (draft := facts.get("draft_model")) is not None:
            _log.info(
                "engine %s: %d of %d parameters of the model that drafts are the policy's; a publish changes no others",
                self.name, len(draft["shared"]), draft["num_parameters"],
            )  # fmt: skip
        for part, patch in (("the log-probs of sampled tokens", "scoring_patch"), ("adapters", "products_patch")):
            if (report := facts[patch]).startswith(NOT_APPLIED):
                _log.info("engine %s: vLLM computes %s: %s", self.name, part, report)
        if wrong := facts["wrong_rotations"]:
            raise PlatformError(
                f"engine {self.name}: {wrong[0]} rotates queries and keys by wrong positions: start it with "
                f"{COMPILATION_FLAG} '{PLAIN_ROTATION}'"
            )
        if self._replays_routing and not facts["returns_experts"]:
            raise PlatformError(
                f"engine {self.name}: vLLM {facts['vllm']} does not return the experts of each token as vLLM 0.32 does "
                f"with {EXPERTS_FLAG}: use such a vLLM with this flag, or drop --rollout-replay-routing"
            )
        if facts["logprobs_mode"] != _LOG_PROBS_MODE:
            raise PlatformError(
                f"engine {self.name} gives {facts['logprobs_mode']}, but the trainer computes log-probs of logits/T: "
                f"start it with --logprobs-mode {_LOG_PROBS_MODE}"
            )
        if not facts["records_weights"] and self._handle is None:
            # Only for a server that was started here is it certain that no other server uses its engine.
            raise PlatformError(
                f"engine {self.name}: vLLM {facts['vllm']} does not record which weights sampled a token, and this "
                "engine was not started here: let the sidecar start it, or run a vLLM that records it, such as 0.32"
            )
        self.limits = Limits(
            max_model_len=int(facts["max_model_len"]),
            max_num_seqs=int(facts["max_num_seqs"]),
            vocab_size=int(facts["vocab_size"]),
            eos_token_ids=tuple(facts["eos_token_ids"]),
        )

    async def _until_healthy(self) -> None:
        while not await self._connection.is_healthy():
            if fault := self._connection.fault:
                raise EngineLost(f"engine {self.name} ended before it was ready: {fault}\n{self.last_words()}")
            await asyncio.sleep(max(_POLL_SECONDS, _LEAST_SECONDS_BETWEEN_POLLS * Connection.num_watched))

    async def _load_files(self, weights: Weights) -> list[dict[str, Any]]:
        arguments = [encode_places(await self.host.find_weights(weights)), weights.fingerprint]
        if weights.base:
            arguments += [weights.base, str(weights.version + 1)]
        try:
            answers = await self._workers("load", "megatron_rl_load", *arguments)
        except WeightsNotWritten as error:
            raise self.host.explain_not_written(weights, error) from None
        if self._updates is not None:
            self._updates.tell(answers)
            self._updates.tell(answers, "reasons", FROM_FILES)
        return answers

    async def _load_stream(self, weights: Weights) -> list[dict[str, Any]]:
        source = weights.stream
        if self.stream_place is None:
            raise EngineRefused(
                f"engine {self.name} has no place in a stream: start it with --rollout-transport {source.transport}"
            )
        group = f"the group at {source.address}"
        with self._waiting_for(f"its workers waited in {group} for the trainer and for the workers of other engines"):
            for call in streams.list_join_calls(source, self.stream_place):
                await self._connection.post("load", call.route, call.content)
        await self._workers("load", "megatron_rl_begin_stream")
        slow = f"it was receiving from {group}: this engine, another one or the trainer may be the slow one"
        for call in streams.list_receive_calls(source):
            with self._waiting_for(slow) if call.route == streams.RECEIVE else contextlib.nullcontext():
                await self._connection.post("load", call.route, call.content)
        return await self._workers("load", "megatron_rl_end_stream", weights.fingerprint)

    @contextlib.contextmanager
    def _waiting_for(self, what: str) -> Iterator[None]:
        """Note the processes that a step waits for; the note stays if a deadline ends the wait."""
        self._waits_for = what
        try:
            yield
        except Exception:
            # An answer came, and it says itself what is wrong.
            self._waits_for = ""
            raise
        self._waits_for = ""

    async def _sample(self, call: GroupCall) -> GroupAnswer:
        """Ask the engine to sample; if another process has paused it, send the call until it resumes."""
        while True:
            try:
                return await self._ask("generate", call)
            except EngineBusy:
                if self.state is not EngineState.READY:
                    raise
            await asyncio.sleep(_POLL_SECONDS)

    async def _ask(self, step: str, call: GroupCall) -> GroupAnswer:
        """Ask the engine to sample."""
        data = await self._connection.send(step, GENERATE, msgspec.msgpack.encode(call))
        try:
            return msgspec.msgpack.decode(data, type=GroupAnswer)
        except msgspec.DecodeError as error:
            raise EngineRefused(
                f"engine {self.name}: the answer to {call.request_id} cannot be read: {error}"
            ) from None

    async def _explain_silence(self) -> str:
        # The fate of processes on another host may not be known here yet.
        await self.host.answers()
        return self._connection.find_fault() or "its server does not answer"

    async def _find_stall(self) -> str | None:
        """Return how long requests in flight have made no progress, if that is too long."""
        if not self._num_in_flight or self.state is not EngineState.READY:
            return None
        metrics = await self._connection.read_metrics()
        if metrics is None:
            return await self._explain_silence()
        silence = self._progress.measure_silence(metrics)
        longest = self._progress.longest
        most = self._pace.deadline("silence", self._deadlines.stall, longest)
        if silence < most:
            return None
        self._pace.note("silence", silence)
        return f"its core has made no progress for {silence:.0f} s with {self._num_in_flight} groups in flight"
