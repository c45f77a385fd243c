"""A real environment server of verifiers: with a stand-in for the policy, and through the gateway.

`make test-verifiers` runs it.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import transformers

from megatron_rl.confined.process import CallFailed
from megatron_rl.gateway.chats import TemplateChats
from megatron_rl.gateway.rollout_context import RolloutContext
from megatron_rl.gateway.verifiers import VerifiersServer
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.turns import find_span_problems, mask_sampled
from megatron_rl.sidecar.engines import GroupRequest
from tests import chat_models
from tests.agents import acting
from tests.reward_pools import in_event_loop
from tests.turns import make_turn
from tests.verifiers.server import needs_verifiers, serve_guessing

pytestmark = [pytest.mark.slow, needs_verifiers]


class Policy(BaseHTTPRequestHandler):
    """A policy that guesses 1, 2, 3 and so on, and notes the keys that it is called with."""

    protocol_version = "HTTP/1.1"
    calls: list[tuple[str | None, str, dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.calls.append((self.headers.get("x-api-key"), self.path, body))
        said = str(sum(message["role"] == "assistant" for message in body["messages"]) + 1)
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        head = {"id": "1", "created": 0, "model": body["model"], "object": "chat.completion.chunk"}
        first = {"index": 0, "delta": {"role": "assistant", "content": said}, "finish_reason": None}
        last = {"index": 0, "delta": {}, "finish_reason": "stop"}
        chunks = [{**head, "choices": [one]} for one in (first, last)] + [{**head, "choices": [], "usage": usage}]
        assert body["stream"]
        data = "".join(f"data: {chunk}\n\n" for chunk in [*map(json.dumps, chunks), "[DONE]"]).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        pass


class Engines:
    """Engines that guess as `Policy` does."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def generate(self, request: GroupRequest) -> list[wire.Response]:
        said = self._tokenizer.decode(list(request.prompt_tokens)).count("assistant")
        tokens = [*self._tokenizer.encode(str(said)), chat_models.find("<|im_end|>")]
        return [make_turn(tokens, seed=request.seed)]


@contextlib.contextmanager
def serving_policy() -> Iterator[str]:
    """Serve the policy; yield its address."""
    policy = ThreadingHTTPServer(("127.0.0.1", 0), Policy)
    threading.Thread(target=policy.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{policy.server_port}/v1"
    finally:
        policy.shutdown()
        policy.server_close()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Serve the environment."""
    with serve_guessing() as address:
        yield address


@in_event_loop
async def test_rollouts_of_a_real_server_give_their_rewards_or_fail_by_name(address: str) -> None:
    secrets = [{"prompt": "Guess!", "secret": secret} for secret in (3, 13, 99)]
    rows = [*secrets, {"prompt": "?", "task": {"prompt": "Guess!", "secret": 1}}]
    server = VerifiersServer(address, 300, 120, 4)
    await server.start()
    try:
        with serving_policy() as policy:
            contexts = [RolloutContext(row, policy, f"key-{number}", 0, "policy") for number, row in enumerate(rows)]
            outcomes = await asyncio.gather(*map(server.act, contexts), return_exceptions=True)
    finally:
        await server.close()
    found, failed, not_found, whole = outcomes
    assert (found, not_found, whole) == ({"found": 0.5}, {"found": 0.0}, {"found": 0.5})
    assert isinstance(failed, CallFailed)
    assert "TaskError" in str(failed)
    assert "nobody may know this number" in str(failed)
    keys = [key for key, _, _ in Policy.calls]
    assert {key: keys.count(key) for key in keys} == {"key-0": 3, "key-1": 4, "key-2": 4, "key-3": 1}
    assert {path for _, path, _ in Policy.calls} == {"/v1/chat/completions"}
    # Nothing is asked for that would change the policy that samples.
    assert all(set(body) <= {"model", "messages", "stream", "stream_options"} for _, _, body in Policy.calls)


@in_event_loop
async def test_a_rollout_through_the_gateway_has_what_the_policy_and_the_environment_said(
    address: str, tmp_path: Path
) -> None:
    chat_models.save_tokenizer(tmp_path, chat_models.CHATML, "<|im_end|>")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "Guess!"}]
    first = tuple(tokenizer.encode("<|im_start|>user\nGuess!", add_special_tokens=False))
    prompt = wire.Prompt(index=0, row="rows:0", tokens=b"", text=chat, columns={"secret": 3})
    request = GroupRequest("run-1-0", first, 2, 100, wire.Sampling(max_tokens=200, max_turns=5))
    engines, chats = Engines(tokenizer), TemplateChats(tokenizer)
    async with acting(
        tmp_path, "", engines=engines, chats=chats, agent=None, verifiers=address, timeout=120.0
    ) as world:
        held = await world.build_rollouts(-1.0, ()).hold_group(request, prompt)
    for number, response in enumerate(transcript.response for transcript in held):
        assert (response.reward, response.components, response.seed) == (0.5, {"found": 0.5}, 100 + number)
        assert (response.finish_reason, response.branches) == ("stop", [])
        assert list(find_span_problems(response, "1", 5, len(first))) == []
        tokens = wire.decode_tokens(response.tokens)
        assert tokenizer.decode(tokens[mask_sampled(response)]) == "1<|im_end|>2<|im_end|>3<|im_end|>"
        assert tokenizer.decode(tokens[~mask_sampled(response)]).count("It is higher.") == 2
