"""The gateway as the clients of OpenAI and Anthropic see it, over HTTP, with engines that say what they are told."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
import transformers

from megatron_rl.errors import MegatronRLError
from megatron_rl.gateway import application, openai_calls
from megatron_rl.gateway.application import MAX_BODY_BYTES, build_gateway_application
from megatron_rl.gateway.chats import TemplateChats
from megatron_rl.gateway.gateway import Gateway
from megatron_rl.gateway.open_rollout import OpenRollout, Terms, TurnRequest
from megatron_rl.gateway.said import MODEL, CallRefused
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.turns import mask_sampled
from megatron_rl.sidecar.serving import find_url, open_listener, serve
from megatron_rl.tool_calls import PlainReader, Said, ToolCall
from tests import chat_models
from tests.reward_pools import in_event_loop, wait_until
from tests.turns import make_turn

ASKED = {"role": "user", "content": "2 + 3"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


class Thinker:
    """A reader that finds thoughts and calls of tools, in a form of its own, or always the same call."""

    def __init__(self, arguments: str | None = None) -> None:
        self._arguments = arguments

    async def read(self, tokens, text: str, tools) -> Said:
        if self._arguments is not None:
            return Said("", None, (ToolCall("call-1", "add", self._arguments),))
        thought, _, rest = text.rpartition("~")
        name, is_call, arguments = rest.partition("!")
        calls = (ToolCall("call-1", name, arguments),) if is_call and tools else ()
        return Said("" if calls else rest, thought or None, calls)


@dataclasses.dataclass
class World:
    """A gateway that serves, and a rollout in it."""

    gateway: Gateway
    url: str
    key: str
    rollout: OpenRollout
    tokenizer: Any
    requests: list[TurnRequest]

    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic

    async def ask(self, *messages: Any, **changes: Any) -> Any:
        return await self.openai.chat.completions.create(model=MODEL, messages=[*messages], **changes)

    def read_prompt(self, number: int) -> str:
        return self.tokenizer.decode(self.requests[number].tokens)


@contextlib.asynccontextmanager
async def serving(
    folder,
    *texts: str,
    reader: Any = None,
    template: str = chat_models.HERMES,
    end: str = "<|im_end|>",
    advises: bool = False,
    **changes: Any,
) -> AsyncIterator[World]:
    """Serve a gateway whose engines say these texts, one after the other, the last one again and again."""
    chat_models.save_tokenizer(folder, template, end)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    requests: list[TurnRequest] = []

    async def sample(request: TurnRequest) -> wire.Response:
        text = texts[min(len(requests), len(texts) - 1)]
        requests.append(request)
        if text == "broken":
            raise MegatronRLError("engine-3 is lost")
        if text.startswith("xx"):
            await wait_until(lambda: len(requests) != 2)
        if text == "slow":
            await asyncio.sleep(3600)
        tokens = [*tokenizer.encode(text), chat_models.find(end)][: request.max_tokens]
        reason = "stop" if tokens[-1] == chat_models.find(end) else "length"
        return make_turn(tokens, -0.5, seed=request.seed, finish_reason=reason)

    gateway = Gateway(
        TemplateChats(tokenizer), reader or PlainReader(), reads_tools=reader is not None, advises=advises
    )
    listener = open_listener("127.0.0.1", 0)
    gateway.address = f"{find_url(listener)}/v1"
    ended = asyncio.Event()
    task = asyncio.create_task(serve(build_gateway_application(gateway), listener=listener, until=ended))
    prompt = tokenizer.encode("<|im_start|>user\n2 + 3")
    sampling = wire.Sampling(**{"max_tokens": 400, "max_turns": 8, "temperature": 0.7, **changes})
    try:
        with gateway.open(Terms(np.asarray(prompt, dtype="<i4"), 5, sampling), sample) as (key, rollout):
            url = gateway.address
            async with (
                openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as one,
                anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0) as other,
            ):
                yield World(gateway, url, key, rollout, tokenizer, requests, one, other)
    finally:
        ended.set()
        await task


@in_event_loop
async def test_what_the_policy_said_is_never_tokenized_again(tmp_path) -> None:
    async with serving(tmp_path, "5 ", "9") as world:
        first = await world.ask({"role": "system", "content": "Add."}, ASKED, logprobs=True)
        choice = first.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("5 ", "stop")
        assert [one.logprob for one in choice.logprobs.content] == [-0.5, -1.5, -2.5]
        assert [one.token for one in choice.logprobs.content] == ["5", " ", ""]
        assert first.usage.completion_tokens == 3
        # Clients send dumps of messages back, or strip them.
        for answer in (choice.message, {"role": "assistant", "content": "5"}):
            await world.ask({"role": "system", "content": "Add."}, ASKED, answer, {"role": "user", "content": "and 4"})
        assert world.read_prompt(1) == world.read_prompt(2)
        assert world.requests[1].tokens[: len(world.requests[0].tokens) + 3][-3:-1] == (ord("5") - 33, 220)
        assert "5 <|im_end|>\n<|im_start|>user\nand 4<|im_end|>\n<|im_start|>assistant\n" in world.read_prompt(1)
        assert world.gateway.counters.branches == 0
        assert len({request.seed for request in world.requests}) == 3
        assert [request.after for request in world.requests] == [None, "engine-0", "engine-0"]
        response = world.rollout.record.build_response(5, "stop", {"agent": 1.0})
        assert len(response.branches) == 2
        assert sum(mask_sampled(response)) == 3 + 2 + 2


@in_event_loop
async def test_the_groups_prompt_is_shared_and_a_history_that_was_changed_is_a_branch(tmp_path, caplog) -> None:
    async with serving(tmp_path, "5", "6") as world:
        await world.ask(ASKED)
        await world.ask(ASKED, {"role": "assistant", "content": "55"}, ASKED)
        assert world.read_prompt(1).startswith("<|im_start|>user\n2 + 3<|im_end|>\n<|im_start|>assistant\n55<|im_end")
        response = world.rollout.record.build_response(5, "stop", {"agent": 1.0})
        prompt = len(world.rollout.terms.prompt)
        # The first 5 of the answer is shared: what follows it is not.
        opening = len(world.requests[0].tokens) - prompt
        assert response.branches == [wire.Branch(start=opening + 2, after=opening + 1)]
        assert response.spans[0].end == opening
        assert world.gateway.counters.branches == 1
        assert "its message 2 (assistant) differs" in caplog.text
        with pytest.raises(openai.BadRequestError, match="nothing reads the calls of tools of this model"):
            await world.ask(ASKED, tools=[TOOL])


@in_event_loop
async def test_tools_are_refused_if_the_chat_template_writes_none(tmp_path) -> None:
    async with serving(tmp_path, "5", reader=Thinker(), template=chat_models.CHATML) as world:
        with pytest.raises(openai.BadRequestError, match="it does not write the tools that are offered"):
            await world.ask(ASKED, tools=[TOOL])
        assert world.requests == []
        assert (await world.ask(ASKED)).choices[0].message.content == "5"


@in_event_loop
async def test_a_streamed_answer_is_read_by_the_client_of_openai(tmp_path) -> None:
    async with serving(tmp_path, 'why~add!{"a": 1}', "so~5", reader=Thinker()) as world:
        stream = await world.ask(ASKED, tools=[TOOL], stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
        assert "".join(delta.content or "" for delta in deltas) == ""
        assert chunks[-1].usage.completion_tokens == len(world.tokenizer.encode('why~add!{"a": 1}')) + 1
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
        whole = await world.ask(ASKED, tools=[TOOL])
        said = whole.choices[0].message
        assert (said.content, said.reasoning_content) == ("5", "so")
        # Other tools are another chat, whatever its messages are.
        branches = world.gateway.counters.branches
        other = {**TOOL, "function": {**TOOL["function"], "name": "subtract"}}
        for tools in ([TOOL], [other]):
            await world.ask(ASKED, said, ASKED, tools=tools)
        assert world.gateway.counters.branches == branches + 1


@in_event_loop
async def test_the_client_of_anthropic_talks_uses_tools_and_streams(tmp_path) -> None:
    async with serving(tmp_path, 'why~add!{"a": 1}', "so~5", "more", reader=Thinker()) as world:
        client = world.anthropic
        tool = {"name": "add", "input_schema": {"type": "object", "properties": {}}}
        common = {"model": MODEL, "max_tokens": 300, "tools": [tool], "system": "Add."}
        first = await client.messages.create(messages=[ASKED], **common)
        assert first.stop_reason == "tool_use"
        thinking, use = first.content
        assert (thinking.thinking, use.name, use.input) == ("why", "add", {"a": 1})
        result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "5"}]}
        chat = [ASKED, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        async with client.messages.stream(messages=chat, **common) as stream:
            second = await stream.get_final_message()
        assert [block.type for block in second.content] == ["thinking", "text"]
        assert (second.content[1].text, second.stop_reason) == ("5", "end_turn")
        assert (
            'why~add!{"a": 1}<|im_end|>\n<|im_start|>user<tool_response>\n5\n</tool_response><|im_end|>'
            in world.read_prompt(1)
        )
        # Thoughts may be left out of what is sent back.
        chat += [{"role": "assistant", "content": "5"}, {"role": "user", "content": "and?"}]
        await client.messages.create(messages=chat, **common)
        assert "so~5<|im_end|>" in world.read_prompt(2)
        assert world.gateway.counters.branches == 0
        # Its system message parts this chat from the group's prompt, and nothing does later.
        branches = world.rollout.record.build_response(5, "stop", {}).branches
        assert branches == [wire.Branch(start=0, after=1 - len(world.rollout.terms.prompt))]


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"x": NaN}', {"arguments": '{"x": NaN}'}),
        ('{"x": 1e999}', {"arguments": '{"x": 1e999}'}),
        ('{"x": "\\ud83d"}', {"x": "\ud83d"}),
        ("[" * 20_000, {"arguments": "[" * 20_000}),
    ],
)
@in_event_loop
async def test_arguments_that_the_policy_wrote_reach_clients_whatever_they_are(tmp_path, arguments: str, given) -> None:
    async with serving(tmp_path, "5", reader=Thinker(arguments)) as world:
        said = await world.anthropic.messages.create(
            model=MODEL, max_tokens=9, messages=[ASKED], tools=[{"name": "add", "input_schema": {"type": "object"}}]
        )
        assert [block.input for block in said.content] == [given]
        whole = await world.ask(ASKED, tools=[TOOL])
        assert whole.choices[0].message.tool_calls[0].function.arguments == arguments


@in_event_loop
async def test_a_call_that_the_gateway_cannot_answer_ends_its_rollout_by_name(tmp_path, monkeypatch) -> None:
    def fail(*answer: Any) -> Any:
        raise ArithmeticError("no answer is written")

    monkeypatch.setattr(openai_calls, "write_answer", fail)

    async with serving(tmp_path, "5") as world:
        with pytest.raises(openai.APIStatusError, match="the gateway raised ArithmeticError") as raised:
            await world.ask(ASKED)
        assert raised.value.status_code == 410
        assert "no answer is written" in (world.rollout.broken or "")
        assert world.gateway.counters.refused == 1


@in_event_loop
async def test_a_turn_that_calls_a_tool_ends_as_its_template_ends_such_turns(tmp_path) -> None:
    texts, end = ('add!{"a": 1}', "5"), "<|end|>"
    async with serving(tmp_path, *texts, reader=Thinker(), template=chat_models.ONE_CALL, end=end) as world:
        said = (await world.ask(ASKED, tools=[TOOL])).choices[0].message
        await world.ask(ASKED, said, {"role": "user", "content": "go on"}, tools=[TOOL])
        assert 'add!{"a": 1}<|end|><|start_header_id|>user' in world.read_prompt(1)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.2}, "temperature 0.2 is not the run's: leave it out, or write 0.7"),
    ({"top_p": 0.9}, "top_p 0.9 would sample from another policy"),
    ({"extra_body": {"top_k": 5}}, "top_k 5"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"n": 65}, "n 65 must be between 1 and 64"),
    ({"stop": [5]}, "stop must be text"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice 'required' would force"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls False would force"),
    ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, "chat_template_kwargs is not known here"),
    ({"extra_body": {"guided_json": {}}}, "guided_json is not known here"),
    ({"max_tokens": 0}, "max_tokens 0 must be at least 1"),
    ({"messages": []}, "at least one message"),
    ({"messages": [ASKED, {"role": "assistant", "content": "5"}]}, "the last message is the assistant's"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "reads text alone"),
    ({"messages": [{"role": "user", "content": 5}]}, "content must be text"),
    ({"model": "gpt"}, "model 'gpt' is not served: write 'policy'"),
]


@in_event_loop
async def test_what_would_change_the_policy_is_refused_by_name_and_ends_nothing(tmp_path) -> None:
    async with serving(tmp_path, "5") as world:
        for changes, named in REFUSED:
            asked = {"model": MODEL, "messages": [ASKED], **changes}
            with pytest.raises(openai.APIStatusError) as raised:
                await world.openai.chat.completions.create(**asked)
            assert named in raised.value.message
            assert raised.value.status_code == (404 if "model" in changes else 400)
        with pytest.raises(anthropic.BadRequestError, match=r"top_p 0\.5 would sample"):
            await world.anthropic.messages.create(
                model=MODEL, max_tokens=9, messages=[ASKED], extra_body={"top_p": 0.5}
            )
        assert not world.requests
        given = {"temperature": 0.7, "top_p": 1, "n": 1, "seed": 8, "user": "me", "stop": None, "tool_choice": "auto"}
        given["extra_body"] = {"unheard_of": None, "tool_choice": {"type": "auto"}}
        assert (await world.ask(ASKED, **given)).choices[0].message.content == "5"


class Caller:
    """A reader that finds a call of a tool after each text, with an id that follows from the text."""

    async def read(self, tokens, text: str, tools) -> Said:
        return Said(text, None, (ToolCall(f"call-{text}", "add", "{}"),))


@in_event_loop
async def test_an_answer_without_its_text_is_told_by_its_calls_ids_and_an_edited_one_is_a_branch(
    tmp_path, caplog
) -> None:
    async with serving(tmp_path, "first", "second", "on", reader=Caller(), max_tokens=4000, max_turns=20) as world:
        answers = [(await world.ask(ASKED, tools=[TOOL])).choices[0].message for _ in range(2)]
        for number, (text, call_id, num_branches) in enumerate(
            [("", "call-first", 1), ("", "call-second", 1), (None, "call-first", 1), ("first", "call-second", 1),
             ("edited", "call-first", 2), ("", "call-other", 3)]
        ):  # fmt: skip
            call = {**answers[0].tool_calls[0].model_dump(), "id": call_id}
            sent = {"role": "assistant", "content": text, "tool_calls": [call]}
            result = {"role": "tool", "tool_call_id": call_id, "content": f"result {number}"}
            await world.ask(ASKED, sent, result, tools=[TOOL])
            assert world.gateway.counters.branches == num_branches
            if num_branches == 1:
                said = text or call_id.removeprefix("call-")
                assert f"{said}<|im_end|>" in world.read_prompt(-1)
        assert "its message 2 (assistant) differs from all that were recorded" in caplog.text


@in_event_loop
async def test_a_refusal_lists_all_parameters_that_are_refused(tmp_path) -> None:
    async with serving(tmp_path, "5") as world:
        names = ("top_p", "frequency_penalty", "temperature", "tool_choice", "guided_json", "max_tokens")
        with pytest.raises(openai.BadRequestError) as refused:
            await world.ask(
                ASKED, top_p=0.9, frequency_penalty=1, temperature=0.2, tools=[TOOL], tool_choice="required",
                max_tokens=0, extra_body={"guided_json": {}},
            )  # fmt: skip
        assert not [name for name in names if name not in refused.value.message]
        with pytest.raises(anthropic.BadRequestError) as also_refused:
            await world.anthropic.messages.create(
                model=MODEL, max_tokens=9, messages=[], extra_body={"top_k": 3, "thinking": {"type": "disabled"}}
            )
        names = ("messages", "top_k", "thinking")
        assert not [name for name in names if name not in also_refused.value.message]


@in_event_loop
async def test_a_call_with_more_bytes_than_its_rollout_may_have_is_refused_before_it_is_parsed(
    tmp_path, monkeypatch
) -> None:
    parsed: list[int] = []
    monkeypatch.setattr(application, "_parse", lambda data: parsed.append(len(data)) or json.loads(data))

    async with serving(tmp_path, "5", "9") as world:
        for num_bytes in (2 << 20, 15 << 20):
            with pytest.raises(openai.BadRequestError, match=r"may have 1,074,.* bytes, and one has") as refused:
                await world.ask({"role": "user", "content": " " * num_bytes})
            assert refused.value.code == "limit"
        assert parsed == []
        # It is not the rollout's end.
        assert (await world.ask(ASKED)).choices[0].message.content == "5"
        assert len(parsed) == 1


@in_event_loop
async def test_calls_that_cannot_be_read_end_their_rollout_and_foreign_and_late_ones_are_refused(tmp_path) -> None:
    async def post(world: World, **content: Any) -> httpx.Response:
        async with httpx.AsyncClient() as client:
            headers = {"authorization": f"Bearer {content.pop('key', world.key)}"}
            return await client.post(f"{world.url}/chat/completions", headers=headers, **content)

    for body, status in ((b"{", 400), (b"[1]", 400), (b"[" * 100_000, 400), (b" " * (MAX_BODY_BYTES + 1), 413)):
        async with serving(tmp_path, "slow") as world:
            waiting = asyncio.create_task(world.ask(ASKED))
            await wait_until(lambda: world.requests)
            foreign = await post(world, json={}, key="sk-other")
            assert (foreign.status_code, foreign.json()["error"]["code"]) == (401, "invalid_api_key")
            assert not world.rollout.ended.is_set()
            answer = await post(world, content=body)
            assert (answer.status_code, world.rollout.ended.is_set()) == (status, True)
            assert "its agent made a call that cannot be read" in (world.rollout.broken or "")
            with pytest.raises(openai.AuthenticationError, match="has ended"):
                await waiting
            late = await post(world, json={"model": MODEL, "messages": [ASKED]})
            assert (late.status_code, late.json()["error"]["code"]) == (401, "ended")
    with pytest.raises(CallRefused, match="the rollout of this key has ended"):
        world.gateway.find(world.key, ("", 0), ("", 0))


@in_event_loop
async def test_a_call_whose_body_arrives_after_its_rollouts_end_is_refused_and_not_sampled(tmp_path) -> None:
    async with serving(tmp_path, "5") as world:
        body = json.dumps({"model": MODEL, "messages": [ASKED]}).encode()

        async def send() -> AsyncIterator[bytes]:
            yield body[:9]
            await world.rollout.ended.wait()
            yield body[9:]

        finding = asyncio.Event()
        find = world.gateway.find
        world.gateway.find = lambda *call: (finding.set(), find(*call))[1]
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {world.key}"}) as client:
            asking = asyncio.create_task(client.post(f"{world.url}/chat/completions", content=send()))
            await finding.wait()
            world.rollout.end()
            answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "ended")
        assert world.requests == []


@in_event_loop
async def test_limits_of_tokens_and_turns_refuse_the_call_that_passes_them(tmp_path) -> None:
    room = 60
    async with serving(tmp_path, "x" * 30, max_tokens=room) as world:
        short = await world.ask(ASKED, max_tokens=3)
        opening = world.requests[0].tokens[len(world.rollout.terms.prompt) :]
        assert (short.choices[0].finish_reason, short.choices[0].message.content) == ("length", "xxx")
        # Both were given all that was left: the one that ends last keeps what the other leaves.
        both = await asyncio.gather(world.ask(ASKED), world.ask(ASKED), return_exceptions=True)
        assert [request.max_tokens for request in world.requests[1:]] == [room - len(opening) - 3] * 2
        kept = [one.usage.completion_tokens for one in both if not isinstance(one, BaseException)]
        assert sorted(kept) == [room - len(opening) - 3 - 31, 31]
        assert world.rollout.record.num_tokens == room
        with pytest.raises(openai.BadRequestError, match="none is left: end here"):
            await world.ask(ASKED)
        assert world.rollout.limit is not None
        assert world.rollout.is_cut
    async with serving(tmp_path, "5", max_turns=1) as world:
        await world.ask(ASKED)
        assert world.requests[0].max_tokens == 400 - len(opening)
        with pytest.raises(openai.BadRequestError, match="all 1 turns of this rollout are taken"):
            await world.ask(ASKED)


@in_event_loop
async def test_a_call_beyond_the_limits_is_refused_before_it_is_tokenized(tmp_path, monkeypatch) -> None:
    async with serving(tmp_path, "5", max_turns=1) as world:
        tokenized: list[str] = []
        encode = world.tokenizer.encode
        monkeypatch.setattr(
            world.tokenizer, "encode", lambda text, **rest: (tokenized.append(text), encode(text, **rest))[1]
        )
        with pytest.raises(openai.BadRequestError, match="may have 400 tokens, and a call has more: end here"):
            await world.ask({"role": "user", "content": "x" * 50_000})
        assert tokenized == []
        await world.ask(ASKED)
        tokenized.clear()
        with pytest.raises(openai.BadRequestError, match="all 1 turns of this rollout are taken"):
            await world.ask(ASKED)
        assert tokenized == []


@in_event_loop
async def test_a_failure_of_the_engines_ends_the_rollout_and_nothing_is_recorded_for_a_client_that_left(
    tmp_path,
) -> None:
    async with serving(tmp_path, "broken") as world:
        with pytest.raises(openai.APIStatusError, match="engine-3 is lost"):
            await world.ask(ASKED)
        assert str(world.rollout.fault) == "engine-3 is lost"
    async with serving(tmp_path, "slow", "5") as world:
        with pytest.raises(openai.APITimeoutError):
            await world.ask(ASKED, timeout=0.2)
        await world.ask(ASKED)
        assert world.rollout.record.num_turns == 1
        # The turn that was given up is not counted.
        assert world.rollout._num_taken == 1
        assert json.loads(json.dumps(world.gateway.status()))["gateway_calls"] == 2


@pytest.mark.parametrize(("path", "carrier"), [("chat/completions", "x-api-key"), ("messages", "authorization")])
@in_event_loop
async def test_a_key_is_read_where_a_proxy_has_left_it(tmp_path, path: str, carrier: str) -> None:
    async with serving(tmp_path, "5") as world, httpx.AsyncClient(base_url=world.url) as client:
        headers = {"authorization": "Bearer EMPTY", "x-api-key": "EMPTY"}
        body = {"model": MODEL, "messages": [ASKED], "max_tokens": 5}
        assert (await client.post(f"/{path}", headers=headers, json=body)).status_code == 401
        headers[carrier] = f"Bearer {world.key}" if carrier == "authorization" else world.key
        assert (await client.post(f"/{path}", headers=headers, json=body)).status_code == 200
