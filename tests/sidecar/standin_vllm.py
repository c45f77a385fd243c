"""A stand-in for a vLLM server that starts in a second: a server, its core and a worker, each tied to its parent.

It does what a vLLM 0.32 does when one of them dies. A request to the core that is not for sampling waits for ever; the
server takes no others once it has noticed; and it ends only when the last request is over.

`python standin_vllm.py SOCKET STEP=SECONDS ...` makes steps last; all other steps take no time.
"""

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import setproctitle
import uvicorn

from megatron_rl.sidecar import parent
from megatron_rl.sidecar.vllm import routes
from megatron_rl.sidecar.vllm.routes import GroupAnswer, GroupChoice, GroupSpan

WATCHDOG_SECONDS = 5.0
SLICE_SECONDS = 0.01
EXIT_OF_A_CORE_WITHOUT_WORKER = 1


def receive(channel: socket.socket) -> list[dict[str, Any]] | None:
    """Return the messages that have come; None once the other end is gone."""
    data = b""
    while not data.endswith(b"\n"):
        try:
            part = channel.recv(1 << 16)
        except ConnectionError:
            part = b""
        if not part:
            return None
        data += part
    return [json.loads(line) for line in data.splitlines()]


def send(channel: socket.socket, **message: Any) -> None:
    with contextlib.suppress(OSError):
        channel.sendall(json.dumps(message).encode() + b"\n")


def work(channel: socket.socket, seconds: dict[str, float]) -> None:
    """Run as the worker: each message is a step, which takes its time."""
    setproctitle.setproctitle("VLLM::Worker_TP0")
    signal.signal(signal.SIGUSR1, lambda *_: spin())
    while (messages := receive(channel)) is not None:
        for message in messages:
            end = time.monotonic() + seconds.get(message["step"], 0.0)
            while time.monotonic() < end:
                time.sleep(SLICE_SECONDS)
                send(channel, progress=True)
                if message["step"] == "sampling" and select.select([channel], [], [], 0)[0]:
                    receive(channel)
                    end = time.monotonic() + seconds.get("cut", 0.0)
            send(channel, id=message["id"], pid=os.getpid())


def spin() -> None:
    while True:
        pass


def run_core(server: socket.socket, seconds: dict[str, float]) -> None:
    """Run as the core: hand every message on to the worker, and end with it."""
    mine, workers = socket.socketpair()
    if os.fork() == 0:
        server.close()
        mine.close()
        work(workers, seconds)
        os._exit(0)
    workers.close()
    setproctitle.setproctitle("VLLM::EngineCore")
    other = {server: mine, mine: server}
    while True:
        for channel in select.select([server, mine], [], [])[0]:
            messages = receive(channel)
            if messages is None:
                if channel is mine:
                    print("ERROR Worker proc VLLM::Worker_TP0 died unexpectedly, shutting down executor.", flush=True)
                os._exit(EXIT_OF_A_CORE_WITHOUT_WORKER)
            for message in messages:
                send(other[channel], **message)


class EngineDeadError(Exception):
    pass


class Client:
    """vLLM's client of its core, with the parts that our routes and the server below use."""

    def __init__(self, core: socket.socket) -> None:
        self.engine_core = self
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls=None))
        self.is_dead = False
        self.num_steps = 0
        self.tag = ""
        self.held = ""
        self._core = core
        self._num_asked = 0
        self._answers: dict[int, tuple[bool, asyncio.Future[dict[str, Any]]]] = {}
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._receive, daemon=True).start()

    async def ask(self, step: str) -> dict[str, Any]:
        if self.is_dead:
            raise EngineDeadError("EngineCore encountered an issue")
        self._num_asked += 1
        answer = self._loop.create_future()
        self._answers[self._num_asked] = (step == "sampling", answer)
        send(self._core, id=self._num_asked, step=step)
        return await answer

    async def pause_scheduler_async(self, **_: Any) -> None:
        await self.ask("pause")

    async def update_weight_version(self, tag: str) -> None:
        await self.ask("commit")
        self.tag = tag

    async def get_weight_version(self) -> str:
        await self.ask("read")
        return self.tag

    async def collective_rpc(
        self, method: str, timeout: object = None, args: tuple[str, ...] = ()
    ) -> list[dict[str, Any]]:
        step = method.removeprefix("megatron_rl_")
        answer = await self.ask({"report": "read"}.get(step, step))
        if step == "load":
            self.held = args[1]
        return [{**FACTS, "pid": answer["pid"], "fingerprint": self.held}]

    async def reset_prefix_cache(self, of_running: bool, of_connector: bool) -> bool:
        await self.ask("read")
        return True

    async def resume_generation(self) -> None:
        await self.ask("resume")

    async def abort(self, request_id: str) -> None:
        await asyncio.sleep(0)
        send(self._core, step="abort", id=0)

    def _receive(self) -> None:
        while (messages := receive(self._core)) is not None:
            for message in messages:
                self._loop.call_soon_threadsafe(self._take, message)
        self._loop.call_soon_threadsafe(self._die)

    def _take(self, message: dict[str, Any]) -> None:
        self.num_steps += 1
        if (message.get("id") or 0) in self._answers:
            self._answers.pop(message["id"])[1].set_result(message)

    def _die(self) -> None:
        print("ERROR EngineCore died: EngineDeadError", flush=True)
        self.is_dead = True
        for is_sampling, answer in self._answers.values():
            # vLLM's client tells only the requests that sample; the others wait for ever.
            if is_sampling and not answer.done():
                answer.set_exception(EngineDeadError("EngineCore encountered an issue"))


async def sample(client: Client, call: routes.GroupCall) -> GroupAnswer:
    is_probe = "prompt_logprobs" in call.sampling
    await client.ask("probe" if is_probe else "sampling")
    prompt = np.frombuffer(call.prompt, dtype="<i4")
    token = np.asarray([7], dtype="<i4").tobytes()
    log_prob = np.asarray([-1.0], dtype="<f4").tobytes()
    choices = [
        GroupChoice(index, "stop", token, token, log_prob, [GroupSpan(client.tag, 0, 1)])
        for index in range(call.sampling["n"])
    ]
    return GroupAnswer(choices, prompt[1:].tobytes(), np.full(len(prompt) - 1, -1.0, "<f4").tobytes())


class Server:
    """The routes of vLLM that the sidecar uses."""

    def __init__(self, client: Client) -> None:
        self.state = SimpleNamespace(engine_client=client)
        self._client = client

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        status, content = 200, b"{}"
        try:
            await routes._read_body(receive)
            content = await self._answer(scope["path"])
        except EngineDeadError:
            status = 503
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": content})

    async def _answer(self, path: str) -> bytes:
        client = self._client
        if path == "/metrics":
            return f"vllm:steps {client.num_steps}\n".encode()
        if path == "/health":
            if client.is_dead:
                raise EngineDeadError
            return b""
        if path == "/reset_prefix_cache":
            return b'{"success": true}'
        await client.ask(TRANSFERS[path])
        return b"{}"


TRANSFERS = {
    "/init_weight_transfer_engine": "join", "/start_weight_update": "begin", "/update_weights": "receive",
    "/finish_weight_update": "finish", "/shutdown_weight_transfer_engine": "leave",
}  # fmt: skip
FACTS = {
    "vllm": "stand-in", "rank": 0, "world_size": 1, "max_model_len": 512, "max_num_seqs": 64, "vocab_size": 512,
    "dtype": "float32", "quantization": "", "has_experts": False, "device": "cpu",
    "logprobs_mode": "processed_logprobs", "records_weights": True, "eos_token_ids": [], "moe_patch": "",
    "wrong_rotations": [], "scoring_patch": "", "products_patch": "", "unknown": [], "obstacles": [],
    "reloaded": True, "compared": 1, "parameters": 1, "uncompared": [], "unheld": [], "shares": {}, "through": "files",
    "reasons": [],
}  # fmt: skip


class Running(uvicorn.Server):
    """uvicorn as vLLM runs it: when asked to end, it ends the core first."""

    core = 0

    def handle_exit(self, *_: Any) -> None:
        os.kill(self.core, signal.SIGTERM)
        self.should_exit = True


async def serve(address: str, core: socket.socket, core_pid: int) -> None:
    client = Client(core)
    server = Server(client)
    routes.sample_group = sample
    inner = routes.Routes(server)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await inner({**scope, "app": server}, receive, send)

    running = Running(uvicorn.Config(app, uds=address, lifespan="off", log_level="info", access_log=False))
    running.core = core_pid

    async def watch() -> None:
        while True:
            await asyncio.sleep(WATCHDOG_SECONDS)
            running.should_exit |= client.is_dead

    watching = asyncio.create_task(watch())
    await running.serve()
    watching.cancel()


def main() -> None:
    address, *words = sys.argv[1:]
    seconds = {step: float(number) for step, _, number in (word.partition("=") for word in words)}
    parent.tie()
    mine, cores = socket.socketpair()
    core = os.fork()
    if core == 0:
        mine.close()
        run_core(cores, seconds)
    cores.close()
    end = time.monotonic() + seconds.get("start", 0.0)
    while time.monotonic() < end:
        time.sleep(SLICE_SECONDS)
        if os.waitpid(core, os.WNOHANG) != (0, 0):
            raise SystemExit("Engine core initialization failed")
    asyncio.run(serve(address, mine, core))


if __name__ == "__main__":
    main()
