"""The judge of `--reward judge:FOLDER`: a vLLM server that the sidecar starts, watches and ends.

Invariants:

- answers are greedy. With --judge-max-num-seqs 1 each is computed alone and from no cache, so that it follows from its
  question; with more, the others that are written at the same time can decide a near tie;
- equal questions of a group are asked once, and one without an answer changes the scores of no other;
- a judge that is lost ends the run by name, and its processes end with the sidecar, however that ends.
"""

import asyncio
import contextlib
import dataclasses
import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_rl.config.settings import RewardConfig
from megatron_rl.errors import UsageError
from megatron_rl.rewards.judging import CAUSES, FAILED, name_counts, read_score, write_question
from megatron_rl.rewards.model_folders import JUDGE, hash_folder, read_special_tokens
from megatron_rl.rewards.spec import parse_on_error
from megatron_rl.rewards.types import Misfit, RewardError, RewardRequest, RewardResult, RewardSpec, Values
from megatron_rl.shared.records.append_file import make_private_folder
from megatron_rl.sidecar.engines import EngineLost, EngineRefused
from megatron_rl.sidecar.engines.hosts import OWN_HOST
from megatron_rl.sidecar.launcher import Handle, LocalLauncher, ProcessSpec
from megatron_rl.sidecar.settings import SidecarSettings
from megatron_rl.sidecar.temporary import make_socket_folder
from megatron_rl.sidecar.vllm.connection import Connection
from megatron_rl.sidecar.vllm.server import ServerConfig, make_process_spec

_POLL_SECONDS = 0.2
_HEALTH_SECONDS = 60.0
_ROUTE = "/v1/chat/completions"
_CHECKED = "--judge-prompt, --judge-vllm-args and the limit @SECONDS"


class Verdict(NamedTuple):
    score: float
    cause: str
    """The reason why it is not the judge's own; empty if it is."""
    reason: str = ""
    """The reason of a failure; empty if there was none."""


class Judge:
    """Satisfies `megatron_rl.rewards.pool.RewardKind`."""

    def __init__(self, spec: RewardSpec, config: RewardConfig, process: ProcessSpec, start_seconds: float) -> None:
        """Make the judge of checked settings; `process` is its server's."""
        assert config.judge_prompt is not None and spec.argument is not None
        self.warnings: list[str] = []
        self._spec, self._config, self._process, self._start_seconds = spec, config, process, start_seconds
        self._template = config.judge_prompt.read_text(encoding="utf-8")
        self._folder = Path(spec.argument)
        self._special = read_special_tokens(self._folder)
        self._places = asyncio.Semaphore(config.judge_max_num_seqs)
        self._substitute = parse_on_error(config.on_error)
        self._handle: Handle | None = None
        self._connection: Connection | None = None

    @property
    def identity(self) -> str:
        """Everything that decides a score."""
        chosen = (self._config.judge_pattern, self._config.judge_default, self._config.judge_max_tokens)
        ways = (self._config.judge_max_num_seqs, self._config.judge_vllm_args, self._config.on_error)
        return json.dumps([hash_folder(self._folder), self._template, self._spec.weight, *chosen, *ways])

    async def start(self) -> None:
        """Start the server and wait until it answers."""
        self._handle = LocalLauncher().start(self._process)
        self._connection = Connection("judge", OWN_HOST.connect(self._handle.address), self._handle, _HEALTH_SECONDS)
        end = time.monotonic() + self._start_seconds
        while not await self._connection.is_healthy():
            if self._connection.fault or time.monotonic() > end:
                reason = self._connection.fault or f"not ready after {self._start_seconds:g} s"
                raise EngineLost(f"the judge did not start: {reason}\n{self._connection.last_words()}")
            await asyncio.sleep(_POLL_SECONDS)

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()
        if self._handle is not None:
            await asyncio.to_thread(self._handle.kill)

    async def try_on(self, trials: Sequence[RewardRequest]) -> None:
        """Ask about the first row with made-up responses.

        Raise a UsageError if an answer fails and `on_error` has no value; warn if one does, or if none gives a score.
        """
        flag = f"--reward {self._spec.name}"
        try:
            for trial in trials:
                self._write_questions(trial)
            found = await self._ask(trials[0]) if trials else []
        except Misfit as error:
            raise UsageError(f"{flag}: {trial.row}: {error}") from None
        except EngineRefused as error:
            raise UsageError(f"{flag} failed in its trial: {error}; correct {_CHECKED}") from None
        causes = [cause for cause in CAUSES if cause in {answer.cause for answer in found}]
        if FAILED in causes:
            reason = next(answer.reason for answer in found if answer.cause == FAILED)
            self.warnings.append(
                f"{flag} failed in its trial: {reason}; correct {_CHECKED}: until then --reward-on-error replaces its "
                "scores"
            )
        elif found and all(answer.cause for answer in found):
            self.warnings.append(
                f"{flag}: in a trial all answers were {' or '.join(causes)}, and no score was read from any: check "
                f"--judge-prompt, --judge-pattern and --judge-max-tokens"
            )

    async def score(self, request: RewardRequest) -> RewardResult:
        """Score a group; raise a RewardError if the judge is lost, or refuses and `on_error` has no value."""
        begin, name = time.monotonic(), self._spec.name
        try:
            found = await self._ask(request)
        except EngineLost as error:
            raise RewardError(name, request, str(error), is_at_fault=False) from None
        except (Misfit, EngineRefused) as error:
            if self._substitute is None:
                raise RewardError(name, request, str(error)) from None
            found = [Verdict(self._substitute, FAILED, str(error))] * len(request.completions)
        components: dict[str, Values] = {name: [answer.score for answer in found]}
        for cause, count in name_counts(name).items():
            components[count] = [float(answer.cause == cause) for answer in found]
        rewards: Values = [self._spec.weight * answer.score for answer in found]
        reasons = [answer.reason for answer in found if answer.reason]
        return RewardResult(rewards, components, time.monotonic() - begin, {name: reasons[0]} if reasons else {})

    def _write_questions(self, request: RewardRequest) -> list[str]:
        given = self._template, self._special, request.prompt
        return [write_question(*given, completion, request.columns) for completion in request.completions]

    async def _ask(self, request: RewardRequest) -> list[Verdict]:
        """Ask about each response; raise an EngineRefused if a question fails and `on_error` has no value."""
        questions = self._write_questions(request)
        asked = list(dict.fromkeys(questions))
        answers = dict(zip(asked, await asyncio.gather(*map(self._judge, asked)), strict=True))
        return [answers[text] for text in questions]

    async def _judge(self, question: str) -> Verdict:
        messages = [{"role": "user", "content": question}]
        limits = {"max_tokens": self._config.judge_max_tokens, "temperature": 0, "seed": 0}
        assert self._connection is not None
        try:
            async with self._places, asyncio.timeout(self._spec.timeout):
                answer = await self._connection.post("answer", _ROUTE, {"model": JUDGE, "messages": messages, **limits})
        except (EngineRefused, TimeoutError) as error:
            reason = str(error) or f"a question had no answer within {self._spec.timeout:g} seconds"
            if self._substitute is None:
                raise EngineRefused(reason) from None
            return Verdict(self._substitute, FAILED, reason)
        (choice,) = answer["choices"]
        return Verdict(*read_score(self._config, choice["message"]["content"] or "", choice["finish_reason"] != "stop"))


def open_judge(
    spec: RewardSpec, settings: SidecarSettings, num_threads: int, stack: contextlib.AsyncExitStack
) -> Judge:
    """Make the judge of a run, which is started with the rewards."""
    reward, rollout, sockets = settings.reward, settings.rollout, make_socket_folder()
    stack.callback(shutil.rmtree, sockets, ignore_errors=True)
    config = ServerConfig(
        str(Path(str(spec.argument)).resolve()),
        max_model_len=0,
        device=settings.device,
        tensor_parallel_size=len(reward.judge_devices or "1"),
        devices=tuple(reward.judge_devices or ()),
        num_threads=num_threads,
        python=str(rollout.python or sys.executable),
    )
    make_private_folder(logs := settings.folder / "logs")
    process = make_process_spec(config, "judge", sockets / "judge", logs / "judge.log")
    process = dataclasses.replace(process, command=_list_words(config, reward, process.address))
    return Judge(dataclasses.replace(spec, argument=config.model), reward, process, rollout.start_minutes * 60)


def _list_words(config: ServerConfig, reward: RewardConfig, address: str) -> tuple[str, ...]:
    command = [
        config.python, "-m", "megatron_rl.sidecar.vllm.api_server",
        "--model", config.model, "--served-model-name", JUDGE, "--uds", address, "--disable-uvicorn-access-log",
        "--max-num-seqs", str(reward.judge_max_num_seqs), "--tensor-parallel-size", str(config.tensor_parallel_size),
        # Without the sampling parameters of the checkpoint's generation_config.json.
        "--generation-config", "vllm",
        *(["--no-enable-prefix-caching"] if reward.judge_max_num_seqs == 1 else []),
        *(["--enforce-eager"] if config.device == "cpu" else []),
    ]  # fmt: skip
    return (*command, *shlex.split(reward.judge_vllm_args))
