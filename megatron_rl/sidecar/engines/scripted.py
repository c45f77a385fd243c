"""An engine for tests and rehearsals: its responses are a pure function of seed, prompt and fingerprint.

It replaces a vLLM engine within this process, with the speed, lengths, delays and faults that a test sets. It is never
the default.
"""

import asyncio
import dataclasses
import difflib
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.errors import InputError
from megatron_rl.shared.protocol.wire import (
    Drafts,
    EngineKind,
    Response,
    Sampling,
    VersionSpan,
    Weights,
    encode_log_probs,
    encode_tokens,
)
from megatron_rl.sidecar.engines import EngineHost, EngineLost, EngineState, GroupRequest, ProbeReport, WeightReport
from megatron_rl.sidecar.engines.decoding import Decoding, StepCosts
from megatron_rl.sidecar.engines.hosts import OWN_HOST
from megatron_rl.sidecar.streams import StreamPlace
from megatron_rl.types import Architecture

Fault = Literal["die", "hang", "refuse", "cut"]
Step = Literal["pause", "reach", "load", "commit", "probe"]


@dataclasses.dataclass(frozen=True)
class Script:
    """The behaviour of a scripted engine."""

    vocab_size: int = 1000
    lengths: tuple[int, int] = (1, 32)
    """The least and the most tokens of a response; the request's own bound holds too."""
    tokens_per_second: float | None = None
    """Tokens per second of all responses in flight together; None answers at once."""
    decoding: StepCosts | None = None
    """The seconds of a step in which every response gets a token, in place of `tokens_per_second`."""
    delay: Callable[[GroupRequest], float] = lambda request: 0.0
    """Seconds that a group takes in addition to its tokens."""
    group_faults: Mapping[str, Fault] = dataclasses.field(default_factory=dict)
    """Faults by the id of a request; each happens the first time that the request comes."""
    step_faults: Mapping[Step, Fault] = dataclasses.field(default_factory=dict)
    """Faults by the step of a publish; each happens once."""
    keeps_old_weights: bool = False
    """Whether it reports each published version but continues to sample with the first one."""


class ScriptedEngine:
    """A scripted engine. Satisfies `megatron_rl.sidecar.engines.Engine`."""

    def __init__(self, name: str, script: Script = Script()):
        self.name = name
        self.state = EngineState.READY
        self.num_workers = 1
        self.host: EngineHost = OWN_HOST
        self.stream_place: StreamPlace | None = None
        self.script = script
        self.num_served = 0
        self._report = WeightReport(version=-1, fingerprint="")
        self._sampled_with = ""
        self._group_faults = dict(script.group_faults)
        self._step_faults = dict(script.step_faults)
        self._running = asyncio.Event()
        self._running.set()
        self._num_in_flight = 0
        self._decoding = None if script.decoding is None else Decoding(script.decoding)

    @property
    def kind(self) -> EngineKind:
        """The kind of an engine without a model, and so without log-probs to compare with the trainer's."""
        return EngineKind(has_model=False)

    async def start(self) -> None:
        self.state = EngineState.WAITING

    def last_words(self) -> str:
        """Name the kind of engine: it has no log."""
        return "it is a scripted engine"

    async def generate(self, request: GroupRequest) -> list[Response]:
        await self._running.wait()
        await self._act(self._group_faults.pop(request.request_id, None))
        self._num_in_flight += 1
        try:
            responses = [self._respond(request, sample) for sample in range(request.group_size)]
            lengths = await self._take_time(request, [len(response.tokens) // 4 for response in responses])
            self._must_live()
            self.num_served += 1
            return [_cut(response, length) for response, length in zip(responses, lengths, strict=True)]
        finally:
            self._num_in_flight -= 1

    async def count_drafts(self) -> Drafts | None:
        return None

    async def pause(self) -> None:
        await self._step("pause")
        self._running.clear()
        while self._num_in_flight:
            await asyncio.sleep(0.001)
        self.state = EngineState.PUBLISHING

    async def sleep(self) -> None:
        await self.pause()
        self.state = EngineState.WAITING

    async def reach(self, weights: Weights) -> None:
        await self._step("reach")

    async def load(self, weights: Weights) -> WeightReport:
        self.state = EngineState.DIRTY
        await self._step("load")
        before = self._sampled_with
        if not (self.script.keeps_old_weights and before):
            self._sampled_with = weights.fingerprint
        return WeightReport(weights.version, self._sampled_with)

    async def commit(self, report: WeightReport) -> WeightReport:
        await self._step("commit")
        self._report = report
        self.state = EngineState.PUBLISHING
        return report

    async def probe(self, tokens: Sequence[int]) -> ProbeReport:
        await self._step("probe")
        log_probs = _stream(f"probe\0{self._sampled_with}\0{tuple(tokens)}").random(4).tolist()
        after = GroupRequest("probe", tuple(tokens), 1, 0, Sampling(max_tokens=1))
        return ProbeReport(log_probs, self._respond(after, 0))

    def open(self) -> None:
        self.state = EngineState.READY
        self._running.set()

    async def find_fault(self) -> str | None:
        return "it is dead" if self.state is EngineState.DEAD else None

    async def close(self) -> None:
        self.state = EngineState.DEAD

    def _respond(self, request: GroupRequest, sample: int) -> Response:
        seed = request.seed + sample
        stream = _stream(f"{seed}\0{self._sampled_with}\0{tuple(request.prompt_tokens)}")
        least, most = self.script.lengths
        limit = min(most, request.sampling.max_tokens)
        length = int(stream.integers(min(least, limit), limit + 1))
        is_cut = length == request.sampling.max_tokens
        return Response(
            tokens=encode_tokens(stream.integers(0, self.script.vocab_size, length, dtype=np.int32)),
            log_probs=encode_log_probs(-4 * stream.random(length, dtype=np.float32)),
            finish_reason="length" if is_cut else "stop",
            seed=seed,
            engine=self.name,
            spans=[VersionSpan(version=str(self._report.version), start=0, end=length)],
            fingerprint=self._report.fingerprint,
        )

    async def _take_time(self, request: GroupRequest, lengths: list[int]) -> list[int]:
        """Take the time of sampling; return the tokens of each response, fewer if the group was cut off before."""
        seconds = self.script.delay(request)
        if self._decoding is not None:
            await asyncio.sleep(seconds)
            return await self._decoding.sample(lengths, request.cut)
        if self.script.tokens_per_second:
            seconds += sum(lengths) * self._num_in_flight / self.script.tokens_per_second
        share = await _sleep(seconds, request.cut)
        return lengths if share is None else [math.ceil(share * length) for length in lengths]

    async def _step(self, step: Step) -> None:
        self._must_live()
        await self._act(self._step_faults.pop(step, None))

    async def _act(self, fault: Fault | None) -> None:
        self._must_live()
        if fault == "die":
            self.state = EngineState.DEAD
            raise EngineLost(f"engine {self.name} died, as its script says")
        if fault == "hang":
            await asyncio.Event().wait()
        if fault in ("refuse", "cut"):
            raise EngineLost(f"engine {self.name} gave half an answer, as its script says")

    def _must_live(self) -> None:
        if self.state is EngineState.DEAD:
            raise EngineLost(f"engine {self.name} is dead")


class ScriptedFactory:
    """A maker of scripted engines, all alike. Satisfies `megatron_rl.sidecar.supervisor.EngineFactory`."""

    def __init__(self, script: Script):
        self._script = script

    def create(self, name: str) -> ScriptedEngine:
        return ScriptedEngine(name, self._script)

    def adopt(self, name: str, address: str) -> ScriptedEngine:
        raise InputError(f"{address} cannot be adopted: the engines of this sidecar are scripted")

    def release(self, name: str) -> None:
        """Do nothing: a scripted engine holds no devices."""


async def _sleep(seconds: float, cut: asyncio.Event | None) -> float | None:
    """Sleep, and return None; if the event comes first, return the share of the time that has passed."""
    if not seconds:
        return None
    if cut is None:
        await asyncio.sleep(seconds)
        return None
    start = time.monotonic()
    try:
        await asyncio.wait_for(cut.wait(), seconds)
    except TimeoutError:
        return None
    return (time.monotonic() - start) / seconds


def _cut(response: Response, length: int) -> Response:
    """Keep this number of tokens."""
    if 4 * length >= len(response.tokens):
        return response
    spans = [msgspec.structs.replace(span, end=length) for span in response.spans]
    return msgspec.structs.replace(
        response,
        tokens=response.tokens[: 4 * length],
        log_probs=response.log_probs[: 4 * length],
        finish_reason="cut",
        spans=spans,
    )


def _stream(text: str) -> np.random.Generator:
    key = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


class _Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    vocab_size: int | None = None
    lengths: tuple[int, int] = Script().lengths
    tokens_per_second: float | None = None
    step_seconds: tuple[float, float] | None = None
    delay: tuple[float, float] = (0.0, 0.0)
    delay_seed: int = 0


def read_script(path: Path | None, vocab_size: int | None, max_running: int = StepCosts.max_running) -> Script:
    """Read a script, or return the default script without a file; `vocab_size` is the model's, if known.

    If the script has the seconds of a step, at most `max_running` responses run in it.
    """
    fields = _Fields() if path is None else _read(path)
    _check(fields, path, vocab_size)
    return Script(
        vocab_size=fields.vocab_size or vocab_size or Script().vocab_size,
        lengths=fields.lengths,
        tokens_per_second=fields.tokens_per_second,
        decoding=None if fields.step_seconds is None else StepCosts(*fields.step_seconds, max_running),
        delay=lambda request: _delay(fields, request),
    )


def find_problems(
    rollout: RolloutConfig, device: str, hf_model: Path | None, architecture: Architecture | None, length: int | None
) -> Iterator[str]:
    """Yield each mistake in settings for scripted engines."""
    try:
        read_script(rollout.script, architecture.vocab_size if architecture else None)
    except InputError as error:
        yield str(error)


def _read(path: Path) -> _Fields:
    try:
        content = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise InputError(f"--rollout-script {path} cannot be read: {error.strerror}; name a JSON file") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"--rollout-script {path} is not JSON: {error}") from None
    names = _Fields.__struct_fields__
    for name in content if isinstance(content, dict) else ():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            which = f", the nearest is {near[0]}" if near else ""
            raise InputError(f"--rollout-script {path}: unknown field {name}{which}; there are {', '.join(names)}")
    try:
        return msgspec.convert(content, _Fields)
    except msgspec.ValidationError as error:
        raise InputError(f"--rollout-script {path}: {error}") from None


def _check(fields: _Fields, path: Path | None, vocab_size: int | None) -> None:
    least, most = fields.lengths
    shortest, longest = fields.delay
    speed = fields.tokens_per_second
    costs = fields.step_seconds
    for is_right, what in (
        (fields.vocab_size is None or fields.vocab_size >= 1, f"vocab_size {fields.vocab_size}: write at least 1"),
        (
            vocab_size is None or (fields.vocab_size or 0) <= vocab_size,
            f"vocab_size {fields.vocab_size}: the model of --hf-model has {vocab_size} tokens; write no more, or leave "
            f"it out",
        ),
        (1 <= least <= most, f"lengths [{least}, {most}]: write [LEAST, MOST] with 1 <= LEAST <= MOST"),
        (speed is None or 0 < speed < math.inf, f"tokens_per_second {speed}: write a number above 0"),
        (
            costs is None or (min(costs) >= 0 and 0 < sum(costs) < math.inf),
            f"step_seconds {list(costs or ())}: write [STEP, RESPONSE], the seconds of a step and of each response in "
            "it, at least 0 and one of them above",
        ),
        (
            speed is None or costs is None,
            "tokens_per_second and step_seconds: write one of them, for each says how fast tokens come",
        ),
        (
            0 <= shortest <= longest < math.inf,
            f"delay [{shortest:g}, {longest:g}]: write seconds, [LEAST, MOST] with 0 <= LEAST <= MOST",
        ),
    ):
        if not is_right:
            raise InputError(f"--rollout-script {path}: {what}")


def _delay(fields: _Fields, request: GroupRequest) -> float:
    shortest, longest = fields.delay
    text = f"{fields.delay_seed}\0{request.seed}".encode()
    fraction = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") / 2**64
    return shortest + (longest - shortest) * fraction
