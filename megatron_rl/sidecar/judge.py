"""The judge of `--reward judge:FOLDER`: a vLLM server that the sidecar starts, watches and ends.

Invariants:

- answers are greedy. With --judge-max-num-seqs 1 each is computed alone and from no cache, so that it follows from its
  question; with more, the others that are written at the same time can decide a near tie;
- equal questions of a group are asked once, and one without an answer changes the scores of no other;
- a judge that is lost ends the run by name, and its processes end with the sidecar, however that ends.
"""

import asyncio
import contextlib
import json
import shlex
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
from megatron_rl.sidecar.engines import EngineLost, EngineRefused
from megatron_rl.sidecar.settings import SidecarSettings
from megatron_rl.sidecar.side_server import SideServer, open_server

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

    def __init__(self, spec: RewardSpec, config: RewardConfig, server: SideServer) -> None:
        """Make the judge of checked settings."""
        assert config.judge_prompt is not None and spec.argument is not None
        self.warnings: list[str] = []
        self._spec, self._config, self._server = spec, config, server
        self.start, self.close = server.start, server.close
        self._template = config.judge_prompt.read_text(encoding="utf-8")
        self._folder = Path(spec.argument)
        self._special = read_special_tokens(self._folder)
        self._substitute = parse_on_error(config.on_error)

    @property
    def identity(self) -> str:
        """Everything that decides a score."""
        chosen = (self._config.judge_pattern, self._config.judge_default, self._config.judge_max_tokens)
        ways = (self._config.judge_max_num_seqs, self._config.judge_vllm_args, self._config.on_error)
        return json.dumps([hash_folder(self._folder), self._template, self._spec.weight, *chosen, *ways])

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
        try:
            choice = await self._server.ask(_ROUTE, {"messages": messages, **limits}, self._spec.timeout)
        except (EngineRefused, TimeoutError) as error:
            reason = str(error) or f"a question had no answer within {self._spec.timeout:g} seconds"
            if self._substitute is None:
                raise EngineRefused(reason) from None
            return Verdict(self._substitute, FAILED, reason)
        return Verdict(*read_score(self._config, choice["message"]["content"] or "", choice["finish_reason"] != "stop"))


def open_judge(
    spec: RewardSpec, settings: SidecarSettings, num_threads: int, stack: contextlib.AsyncExitStack
) -> Judge:
    """Make the judge of a run, which is started with the rewards."""
    reward, folder = settings.reward, Path(str(spec.argument))
    devices, flags = reward.judge_devices or (), shlex.split(reward.judge_vllm_args)
    num_seqs = reward.judge_max_num_seqs
    return Judge(spec, reward, open_server(JUDGE, folder, devices, flags, settings, num_threads, stack, num_seqs))
