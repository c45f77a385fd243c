"""The reader of turns that asks vLLM's parsers, in a process of the Python that vLLM is installed in.

Invariants:

- a turn that a parser cannot read is text, and the reason is logged once;
- a turn gets its own answer: that of a turn whose caller has left is dropped;
- a process that hangs or ends is replaced before the next turn is read;
- no process outlives `close`.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import PlatformError, UsageError
from megatron_rl.shared.weights.end_tokens import read_end_tokens
from megatron_rl.sidecar import parent
from megatron_rl.sidecar.vllm import parsers
from megatron_rl.sidecar.vllm.server import find_packages
from megatron_rl.tool_calls import JSON, Said, ToolCall

TOOL_FLAG = "--rollout-tool-parser"
REASONING_FLAG = "--rollout-reasoning-parser"
_START_SECONDS = 600.0
_TURN_SECONDS = 20.0
_END_SECONDS = 5.0
# The longest line of an answer, in bytes.
_LONGEST_LINE = 1 << 24
# Texts of chat templates, each with vLLM's parser of the calls that the template writes.
_PARSERS = {
    "<function=": "qwen3_coder",
    '<tool_call>\n{"name"': "hermes",
    "<arg_key>": "glm45",
    "<|python_tag|>": "llama3_json",
    "[TOOL_CALLS]": "mistral",
    "tool▁calls▁begin": "deepseek_v3",
}
_log = logging.getLogger(__name__)


class _Fault(Exception):
    """A process of parsers that gives no answer."""


@dataclasses.dataclass(frozen=True)
class Parsers:
    """The parsers to read with, by vLLM's names, and the folder of the model whose turns they read."""

    tool: str | None
    reasoning: str | None
    model: Path


class VllmReader:
    """Reads turns with vLLM's parsers. It belongs to the event loop that it is started in."""

    def __init__(self, python: str, names: Parsers, log: Path, seconds: float = _TURN_SECONDS) -> None:
        """Make it; `log` takes what the process prints, and a turn is read within `seconds`."""
        self._python = python
        self._names = names
        self._log_file = log
        self._seconds = seconds
        self._process: asyncio.subprocess.Process | None = None
        self._numbers = itertools.count(1)
        self._one_at_a_time = asyncio.Lock()
        self._folder = Path(tempfile.mkdtemp(prefix="mrl-"))
        self._said: set[str] = set()

    @property
    def has_tools(self) -> bool:
        """Check for a parser of calls."""
        return self._names.tool is not None

    async def start(self) -> None:
        """Start the process; raise an error that names the flag if a parser cannot be used."""
        try:
            await self._start()
        except _Fault as fault:
            raise PlatformError(
                f"{self._flag}: {self._python} did not start vLLM's parsers: {fault}; its output is in {self._log_file}"
            ) from None

    async def read(self, tokens: Sequence[int], text: str, tools: Sequence[JSON]) -> Said:
        """Read a turn, one at a time."""
        async with self._one_at_a_time:
            try:
                if self._process is None:
                    await self._start()
                turn = {"number": next(self._numbers), "tokens": list(tokens), "tools": list(tools)}
                answer = await self._ask(turn, self._seconds)
            except _Fault as fault:
                await self._end()
                answer = {"error": str(fault)}
        if "error" in answer:
            self._say_once(str(answer["error"]))
            return Said(text, None, ())
        calls = tuple(ToolCall(*call) for call in answer["calls"])
        return Said(answer["content"], answer["reasoning"], calls)

    async def close(self) -> None:
        """End the process."""
        await self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _flag(self) -> str:
        return TOOL_FLAG if self._names.tool is not None else REASONING_FLAG

    async def _start(self) -> None:
        environment = {
            **os.environ,
            parent.VARIABLE: str(os.getpid()),
            "PYTHONPATH": find_packages(self._python, self._folder),
        }
        with self._log_file.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                self._python, "-m", parsers.__name__,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, limit=_LONGEST_LINE,
            )  # fmt: skip
        setup = {
            "tool_parser": self._names.tool,
            "reasoning_parser": self._names.reasoning,
            "tool_flag": TOOL_FLAG,
            "reasoning_flag": REASONING_FLAG,
            "model": str(self._names.model),
            "ends": read_end_tokens(self._names.model),
        }
        try:
            answer = await self._ask(setup, _START_SECONDS)
        except asyncio.CancelledError:
            # No caller is left for its answer.
            await self._end()
            raise
        if "refused" in answer:
            raise UsageError(f"{self._python}: {answer['refused']}")

    async def _ask(self, content: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer that has the number of this line; the set-up and its answer have none."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                process.stdin.write(json.dumps(content).encode() + b"\n")
                with contextlib.suppress(ConnectionError):
                    await process.stdin.drain()
                while True:
                    answer = await self._receive(process.stdout)
                    # The callers of turns before may have left, as agents' clients do.
                    if answer.get("number") == content.get("number"):
                        return answer
        except TimeoutError:
            raise _Fault(f"it gave no answer within {seconds:g} seconds") from None

    async def _receive(self, answers: asyncio.StreamReader) -> dict[str, Any]:
        try:
            line = await answers.readline()
        except ValueError:
            raise _Fault(f"its answer is longer than {_LONGEST_LINE:,} bytes") from None
        if not line.endswith(b"\n"):
            raise _Fault("its process ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.wait_for(process.wait(), _END_SECONDS)

    def _say_once(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            _log.warning("vLLM's parsers cannot read a turn, which is text then: %s", reason)


def suggest_parser(template: str) -> str | None:
    """Suggest vLLM's parser for the calls that a chat template writes; return None if the template does not tell."""
    written = template.replace("\\n", "\n").replace('\\"', '"')
    return next((name for text, name in _PARSERS.items() if text in written), None)
