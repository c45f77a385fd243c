"""Teachers of `--teacher NAME=engines:FOLDER`: servers that give the log-probs of what the policy sampled.

Invariants:

- a server is asked once about each sequence: a response, or a branch of it with all that it follows;
- a question has the sequence's token ids, and nothing is computed beside it;
- a log-prob that is missing, not finite or another token's raises: none is replaced.
"""

import asyncio
import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from megatron_rl.rewards.model_folders import hash_folder
from megatron_rl.shared.protocol.turns import list_parts, mask_sampled, trace_path
from megatron_rl.shared.protocol.wire import Group, Response, decode_tokens, encode_log_probs
from megatron_rl.sidecar.engines import EngineRefused
from megatron_rl.sidecar.settings import SidecarSettings
from megatron_rl.sidecar.side_server import SideServer, open_server

_ROUTE = "/v1/completions"
# A log-prob of minus infinity, which JSON has no number for, in vLLM's answers.
_LEAST = -9999.0
# vLLM makes an array of a step's tokens times the vocabulary, which it leaves no room for.
_STEP_TOKENS = 2048


class Teachers:
    def __init__(self, servers: Mapping[str, SideServer], hashes: Mapping[str, str], flags: Sequence[str] = ()) -> None:
        """`hashes` has the hash of each server's folder."""
        self.identity = json.dumps([hashes, flags])
        self._servers, self._hashes = servers, hashes

    async def start(self) -> None:
        async with asyncio.TaskGroup() as group:
            for server in self._servers.values():
                group.create_task(server.start())

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self._servers.values()))

    async def teach(self, group: Group) -> Group:
        """Add log-probs to the scored responses, unless their teacher is in the trainer's pass."""
        name = "teacher" if "teacher" in self._servers else f"teacher.{group.prompt.columns.get('teacher')}"
        if name not in self._servers:
            return group
        taught = []
        for response in group.responses:
            if response.reward is not None:
                log_probs = await _teach(self._servers[name], group, response)
                response = msgspec.structs.replace(
                    response, teacher_log_probs=encode_log_probs(log_probs), teacher_hash=self._hashes[name]
                )
            taught.append(response)
        return Group(prompt=group.prompt, responses=taught)


async def _teach(server: SideServer, group: Group, response: Response) -> np.ndarray:
    """Ask a server for the log-probs of a response's tokens."""
    prompt, tokens = decode_tokens(group.prompt.tokens), decode_tokens(response.tokens)
    both, length, parts = np.concatenate([prompt, tokens]), len(prompt), list_parts(response)
    log_probs = np.zeros(len(tokens))
    of = f"{server.name}: for a response to prompt {group.prompt.index} ({group.prompt.row}) it gave"
    for number, (start, end, _) in enumerate(parts):
        ranges = [*trace_path(parts, number, length), (start, end)]
        sequence = np.concatenate([both[length + first : length + last] for first, last in ranges]).tolist()
        asked = {"prompt": sequence, "prompt_logprobs": 0, "max_tokens": 1, "temperature": 0}
        entries = (await server.ask(_ROUTE, asked))["prompt_logprobs"] or ()
        if len(entries) != len(sequence):
            raise EngineRefused(f"{of} log-probs of {len(entries)} tokens, and {len(sequence)} were asked for")
        log_probs[start:end] = [*map(_read, entries, sequence)][len(sequence) - (end - start) :]
    log_probs[~mask_sampled(response)] = 0
    if not np.isfinite(log_probs).all():
        raise EngineRefused(f"{of} no finite log-prob of token {int(np.argmin(np.isfinite(log_probs)))}")
    return log_probs


def _read(entry: Mapping[str, Any] | None, token: int) -> float:
    """Return the log-prob of a token; NaN if the answer has no finite one of this token, or of the first one."""
    value = (entry or {}).get(str(token), {}).get("logprob")
    return math.nan if value is None or value <= _LEAST else value


def open_teachers(settings: SidecarSettings, num_threads: int, stack: contextlib.AsyncExitStack) -> Teachers:
    """Make the servers of a run's teachers, in the engines' precision; the devices are divided among them."""
    devices, architecture = settings.rollout.teacher_devices or [], settings.read_architecture()
    dtype = settings.rollout.dtype or (None if architecture is None else architecture.dtype)
    assert settings.seq_length is not None
    # A server accepts only sequences that leave room for another token.
    flags = ["--max-model-len", str(settings.seq_length + 1), "--max-num-batched-tokens", str(_STEP_TOKENS)]
    # Token ids in and out.
    flags.append("--skip-tokenizer-init")
    flags += ["--dtype", dtype] if dtype is not None else []
    size, servers = len(devices) // len(settings.teachers), {}
    for number, (name, folder) in enumerate(settings.teachers.items()):
        own = devices[number * size : (number + 1) * size]
        servers[name] = open_server(name, folder, own, flags, settings, num_threads, stack)
    return Teachers(servers, {name: hash_folder(folder) for name, folder in settings.teachers.items()}, flags)
