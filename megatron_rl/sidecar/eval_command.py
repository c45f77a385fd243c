"""A program that evaluates the policy through a gateway of its own: an optional part of a sidecar, for --eval-command.

Invariants:

- each call is a rollout of its own, and reaches neither a slot, the journal nor the counters of training;
- its tokens were sampled from the evaluated version, or the program has no figures;
- figures are finite numbers, all that the program wrote; else there is one sentence with the reason.
"""

import asyncio
import contextlib
import itertools
import math
import os
import signal
import sys
import tempfile
from pathlib import Path

import msgspec
import numpy as np

from megatron_rl.errors import MegatronRLError
from megatron_rl.gateway.application import build_gateway_application
from megatron_rl.gateway.gateway import Gateway
from megatron_rl.gateway.open_rollout import Terms, TurnRequest
from megatron_rl.gateway.worker import build_variables
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.provenance import derive_first_seed, tag_version
from megatron_rl.shared.records.append_file import make_private_folder
from megatron_rl.sidecar import parent
from megatron_rl.sidecar.conversations import request_turn
from megatron_rl.sidecar.engines import GroupRequest
from megatron_rl.sidecar.evaluation import Figures, Measure
from megatron_rl.sidecar.group_maker import Samplers
from megatron_rl.sidecar.launcher import LocalLauncher, ProcessSpec
from megatron_rl.sidecar.serving import find_url, open_listener, serve
from megatron_rl.sidecar.settings import SidecarSettings
from megatron_rl.sidecar.user_environments import build_chats
from megatron_rl.sidecar.vllm.reader import VllmReader
from megatron_rl.tool_calls import PlainReader

FILE_VARIABLE, VERSION_VARIABLE = "EVAL_FIGURES", "EVAL_VERSION"
REFUSED = "refused_calls"
"""A figure besides the program's own: a program may count a call that was refused as a wrong answer."""
_LOG, _POLL_SECONDS, _SIGNAL_SECONDS, _END_SECONDS = "eval-command.log", 0.1, 10.0, 30.0
_DONE = "ended with exit code 0"


class EvaluationCommand:
    def __init__(self, command: str, engines: Samplers, gateway: Gateway, longest: int, log: Path) -> None:
        """Make it; a prompt and its answer have at most `longest` tokens."""
        self._command = command
        self._engines = engines
        self._gateway = gateway
        self._longest = longest
        self._log = log

    async def measure(self, evaluation: wire.Evaluation) -> Figures:
        """Run the program until the evaluation's deadline; return its figures, or the reason why there are none."""
        sampling = msgspec.structs.replace(evaluation.sampling, max_tokens=self._longest, max_turns=1 << 30)
        seed = derive_first_seed(evaluation, -1)
        name = f"{evaluation.run}-{evaluation.version}-command"
        request, numbers = GroupRequest(name, (), 1, seed, sampling, can_wait=True), itertools.count()
        # A program may continue after a call that failed, and count it as a wrong answer.
        failures: list[str] = []

        async def sample(turn: TurnRequest) -> wire.Response:
            asked = request_turn(request, f"{next(numbers)}", turn.tokens, turn.seed, turn.max_tokens, None)
            try:
                (response,) = await self._engines.generate(asked)
                _check(evaluation, response)
            except MegatronRLError as error:
                failures.append(str(error))
                raise
            return response

        terms, num_refused = Terms(np.empty(0, "<i4"), seed, sampling), self._gateway.counters.refused
        with tempfile.TemporaryDirectory() as folder, self._gateway.open_for_calls(terms, sample) as key:
            file = Path(folder, "figures.json")
            variables = {FILE_VARIABLE: str(file), VERSION_VARIABLE: str(evaluation.version)}
            reason = await self._run(build_variables(self._gateway.address, key) | variables, evaluation)
            if failures:
                return f"{len(failures)} of its calls were not answered, the first because {failures[0]}"
            figures = reason or _read_figures(file)
        num_refused = self._gateway.counters.refused - num_refused
        return figures | {REFUSED: float(num_refused)} if num_refused and isinstance(figures, dict) else figures

    async def _run(self, variables: dict[str, str], evaluation: wire.Evaluation) -> str | None:
        """Run the program to its end; return the reason if that is not as it should be."""
        command = (sys.executable, "-m", parent.__name__, self._command, str(os.getpid()))
        seconds = evaluation.deadline_seconds
        # The trainer's deadline includes the end of the program's processes.
        seconds = max(seconds / 2, seconds - _END_SECONDS)
        handle = LocalLauncher().start(ProcessSpec("eval-command", command, os.environ | variables, self._log, ""))
        try:
            async with asyncio.timeout(seconds):
                while (end := handle.poll()) is None:
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            end = f"took more than {seconds:g} s: shorten it, or raise --rollout-deadline-minutes"
        finally:
            if handle.poll() is None:
                os.kill(handle.pid, signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_SIGNAL_SECONDS):
                        while handle.poll() is None:
                            await asyncio.sleep(_POLL_SECONDS)
            await asyncio.to_thread(handle.kill)
        return None if end == _DONE else f"it {end}; its output is in {self._log}"


def _check(evaluation: wire.Evaluation, response: wire.Response) -> None:
    tags = {span.version for span in response.spans}
    if tags - {tag_version(evaluation.version)} or response.fingerprint != evaluation.fingerprint:
        raise MegatronRLError(
            f"engine {response.engine} answered with version {', '.join(sorted(tags))} and the fingerprint "
            f"{response.fingerprint[:12]}, and version {evaluation.version} is evaluated"
        )


def _read_figures(file: Path) -> Figures:
    try:
        figures = msgspec.json.decode(file.read_bytes(), type=dict[str, float])
    except (OSError, ValueError) as error:
        return f"it must write a JSON object of numbers to the file that {FILE_VARIABLE} names: {error}"
    wrong = [name for name, value in figures.items() if not math.isfinite(value)]
    if wrong or not figures:
        return f"its figures must be finite numbers, and {', '.join(wrong) or 'there are none'}"
    return figures


async def open_command(
    settings: SidecarSettings, engines: Samplers, stack: contextlib.AsyncExitStack, parsers: VllmReader | None = None
) -> Measure:
    """Open the gateway, on loopback, until the stack ends; `parsers` read the policy's turns, if the run has them."""
    chats, has_tools = await asyncio.to_thread(build_chats, settings), parsers is not None and parsers.has_tools
    gateway = Gateway(chats, parsers or PlainReader(), has_tools)
    listener, ended = open_listener("127.0.0.1", 0), asyncio.Event()
    gateway.address = f"{find_url(listener)}/v1"
    serving = asyncio.create_task(serve(build_gateway_application(gateway), listener=listener, until=ended))

    async def end() -> None:
        ended.set()
        await serving

    stack.push_async_callback(end)
    log = settings.folder / "logs" / _LOG
    make_private_folder(log.parent)
    longest = settings.rollout.max_model_len or settings.seq_length or 1 << 20
    assert settings.eval_command is not None
    return EvaluationCommand(settings.eval_command, engines, gateway, longest, log).measure
