"""Environments of verifiers, which act in rollouts: a client of their server, in the server's own wire format.

The server is a process of its own, with a Python of its own. What travels is MessagePack over ZeroMQ, as verifiers 0.4
sends it: a request for a rollout, then what each trace of the rollout gained, then the reply. The server calls the
policy at the gateway, with the rollout's key. Of what it tells, only rewards and failures are read: the gateway has
the tokens.
"""

import asyncio
import contextlib
import itertools
import math
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from megatron_rl.confined.process import CallFailed, TooSlow
from megatron_rl.environments.types import VERIFIERS_FLAG as FLAG
from megatron_rl.errors import PlatformError, UsageError
from megatron_rl.gateway.rollout_context import RolloutContext

TASK_COLUMN = "task"
"""The column that has the whole task; without it, the task is the row."""
# Seconds between two questions whether the server lives.
_ASK_SECONDS = 5.0


class _Reward(msgspec.Struct):
    score: float
    weight: float = 1.0


class _Failure(msgspec.Struct):
    type: str
    message: str


class _Agent(msgspec.Struct):
    name: str = "agent"
    trainable: bool = True


class _ModelCall(msgspec.Struct):
    model: str | None = None


class _Scalars(msgspec.Struct):
    """The values of a trace that a delta sends when they have changed; the others of them are not read."""

    agent: _Agent | None = None
    rewards: dict[str, _Reward | None] | None = None
    ok: bool | None = None
    stop_condition: str | None = None


class _Delta(msgspec.Struct):
    """A message with what a trace gained; other fields of it are not read."""

    trace: str
    set: _Scalars = msgspec.field(default_factory=_Scalars)
    calls: list[_ModelCall] = []
    errors: list[_Failure] = []


class _Summary(msgspec.Struct):
    id: str
    calls: int


class _EpisodeHead(msgspec.Struct):
    ok: bool = False
    errors: list[_Failure] = []


class _Reply(msgspec.Struct):
    success: bool = True
    error: str | None = None
    head: _EpisodeHead | None = None
    traces: list[_Summary] = []


class _Trace:
    """A trace as its deltas tell it."""

    def __init__(self) -> None:
        self.agent = _Agent()
        self.rewards: dict[str, _Reward | None] = {}
        self.is_ok = False
        self.stop_condition: str | None = None
        self.models: list[str | None] = []
        self.errors: list[_Failure] = []

    def apply(self, delta: _Delta) -> None:
        scalars = delta.set
        self.agent = scalars.agent or self.agent
        self.rewards = self.rewards if scalars.rewards is None else scalars.rewards
        self.is_ok = self.is_ok if scalars.ok is None else scalars.ok
        self.stop_condition = scalars.stop_condition or self.stop_condition
        self.models += [call.model for call in delta.calls]
        self.errors += delta.errors


class Rollout:
    """A rollout of the server, as its messages tell it."""

    def __init__(self) -> None:
        self._traces: dict[str, _Trace] = {}
        self.reply: asyncio.Future[_Reply] = asyncio.get_running_loop().create_future()
        self.is_over = False
        """True once the server has sent its reply."""

    def hear(self, kind: bytes, data: bytes) -> None:
        """Take in a message; one that cannot be read fails the rollout."""
        self.is_over |= kind == b"reply"
        if self.reply.done():
            return
        try:
            if kind == b"delta":
                delta = msgspec.msgpack.decode(data, type=_Delta)
                # Those of attempts that were given up are not among the reply's.
                self._traces.setdefault(delta.trace, _Trace()).apply(delta)
            elif kind == b"reply":
                self.reply.set_result(msgspec.msgpack.decode(data, type=_Reply))
            else:
                raise msgspec.DecodeError(f"a message of kind {kind[:20]!r}")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.fail(f"the server's message is not of verifiers 0.4: {error}; serve it with that release")

    def fail(self, reason: str) -> None:
        if not self.reply.done():
            self.reply.set_exception(CallFailed(reason))

    def read_rewards(self, reply: _Reply, model: str) -> dict[str, float]:
        """Return the weighted rewards of the trace that called the policy, by name; raise CallFailed without them."""
        if not reply.success or reply.head is None:
            raise CallFailed(f"the server failed: {reply.error or 'it gave no reason'}")
        ended = {summary.id: summary for summary in reply.traces}
        for name, summary in ended.items():
            if name not in self._traces or len(self._traces[name].models) != summary.calls:
                raise CallFailed(f"messages of the trace {name} were lost")
        acting = [trace for name, trace in self._traces.items() if name in ended and model in trace.models]
        if len(acting) != 1 or not acting[0].agent.trainable:
            # All that is sampled under a rollout's key is trained on, with one reward.
            names = ", ".join(sorted(trace.agent.name for trace in acting)) or "none"
            raise CallFailed(f"one trainable agent must call the policy, and these did: {names}; give others a model")
        (trace,) = acting
        if not trace.is_ok or not reply.head.ok:
            raise CallFailed(_describe(trace, reply.head))
        rewards = {name: reward.score * reward.weight for name, reward in trace.rewards.items() if reward is not None}
        if not rewards or len(rewards) != len(trace.rewards):
            missing = ", ".join(name for name in trace.rewards if name not in rewards)
            raise CallFailed(f"the environment gave no reward{f' {missing}' if missing else ''}")
        for name, value in rewards.items():
            if not math.isfinite(value):
                raise CallFailed(f"the reward {name} is {value}, and must be finite")
        return rewards


def _describe(trace: _Trace, head: _EpisodeHead) -> str:
    errors = [*trace.errors, *head.errors]
    if errors:
        return f"{errors[-1].type}: {errors[-1].message[:2000]}"
    return f"the rollout ended by {trace.stop_condition or 'a failure without a name'}"


class VerifiersServer:
    """An environment server of verifiers at an address. Satisfies `gateway.rollout_context.Agents`."""

    def __init__(self, address: str, timeout: float, patience: float, concurrency: int) -> None:
        """Make a client; a rollout may take `timeout` seconds, and an answer whether the server lives `patience`."""
        self._address = address
        self._places = asyncio.Semaphore(concurrency)
        self._timeout = timeout
        self._patience = patience
        self._context: Any = None
        self._socket: Any = None
        self._rollouts: dict[bytes, Rollout] = {}
        self._numbers = itertools.count(1)
        self._name = uuid.uuid4().hex
        self._lives = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def identity(self) -> str:
        """Everything that is known to decide what agents do."""
        return f"verifiers at {self._address}"

    async def start(self) -> None:
        """Connect, and wait until the server answers."""
        try:
            import zmq
            import zmq.asyncio
        except ImportError:
            raise UsageError(f"{FLAG} needs pyzmq: pip install 'megatron-rl[verifiers]'") from None

        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        try:
            self._socket.connect(self._address)
        except zmq.ZMQError as error:
            await self.close()
            raise UsageError(f"{FLAG} {self._address}: {error}; write it as tcp://127.0.0.1:5000") from None
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._ask())]
        try:
            async with asyncio.timeout(self._patience):
                await self._lives.wait()
        except TimeoutError:
            await self.close()
            raise PlatformError(
                f"{FLAG} {self._address}: no environment server of verifiers answered within {self._patience:g} "
                "seconds; start it first"
            ) from None

    async def act(self, context: RolloutContext) -> Mapping[str, float]:
        """Have the server act one rollout; return its rewards by name."""
        try:
            data = msgspec.msgpack.encode(build_request(context))
        except (TypeError, ValueError, OverflowError) as error:
            raise CallFailed(f"the row cannot be sent: {error}") from None
        async with self._places:
            return await self._act(data, context)

    async def _act(self, data: bytes, context: RolloutContext) -> dict[str, float]:
        rollout, number = Rollout(), self._number()
        self._rollouts[number] = rollout
        try:
            await self._socket.send_multipart([number, b"run", data])
            async with context.clock.limit(self._timeout):
                reply = await rollout.reply
            return rollout.read_rewards(reply, context.model)
        except TimeoutError:
            raise TooSlow(f"the server used more than {self._timeout:g} seconds of its own") from None
        finally:
            del self._rollouts[number]
            if not rollout.is_over:
                # The server would act to its end otherwise.
                await self._send(b"cancel", {"request_id": number.decode()})

    async def close(self) -> None:
        """Leave the server, which lives on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._socket is not None:
            self._socket.close()
            self._context.term()
            self._socket = None

    def _number(self) -> bytes:
        return f"{self._name}-{next(self._numbers)}".encode()

    async def _send(self, route: bytes, content: Mapping[str, Any]) -> None:
        await self._socket.send_multipart([self._number(), route, msgspec.msgpack.encode(content)])

    async def _listen(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            self._lives.set()
            # Others are answers to questions whether it lives, or belong to rollouts that were given up.
            if len(frames) == 3 and (rollout := self._rollouts.get(frames[0])) is not None:
                rollout.hear(frames[1], frames[2])

    async def _ask(self) -> None:
        """Ask now and then whether the server lives; fail its rollouts if it says nothing for too long."""
        while True:
            self._lives.clear()
            await self._send(b"health", {})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._patience):
                    await self._lives.wait()
            if not self._lives.is_set():
                for rollout in self._rollouts.values():
                    rollout.fail(f"the server at {self._address} said nothing for {self._patience:g} seconds")
            await asyncio.sleep(min(_ASK_SECONDS, self._patience))


def build_request(context: RolloutContext) -> dict[str, Any]:
    """Build the request for a rollout: its task, and the way to the policy."""
    task = context.row.get(TASK_COLUMN)
    return {
        "task_data": task if isinstance(task, Mapping) else dict(context.row),
        "client": {
            "type": "eval",
            "base_url": context.address,
            # The server takes the key of an endpoint from its own environment, and a rollout has a key of its own. It
            # writes the environment's into one of these headers, which depends on the API, and leaves the other.
            "api_key_var": "MEGATRON_RL_NO_KEY",
            "headers": {"Authorization": f"Bearer {context.key}", "x-api-key": context.key},
        },
        "model": context.model,
        "sampling": {},
    }
