"""Requests to the gateway beyond a turn of a chat: other interfaces, several answers, ends and advice."""

import anthropic
import openai
import pytest

from megatron_rl.gateway.said import MODEL
from tests.reward_pools import in_event_loop
from tests.unit.test_gateway import ASKED, TOOL, Thinker, serving


@in_event_loop
async def test_a_stop_text_ends_the_answer_and_what_follows_was_never_said(tmp_path) -> None:
    async with serving(tmp_path, "5 Observation: 6", "7") as world:
        said = await world.ask(ASKED, stop=["nothing", "Observation:"])
        assert (said.choices[0].message.content, said.choices[0].finish_reason) == ("5 ", "stop")
        await world.ask(ASKED, said.choices[0].message, {"role": "user", "content": "8"})
        # The chat continues after the tokens of the text, which the policy said.
        assert world.read_prompt(1).count("5 Observation:<|im_end|>\n<|im_start|>user\n8") == 1
        assert world.gateway.counters.branches == 0
    async with serving(tmp_path, "5 end 6") as world:
        told = await world.anthropic.messages.create(
            model=MODEL, max_tokens=99, messages=[ASKED], stop_sequences=["end"]
        )
        assert (told.content[0].text, told.stop_reason, told.stop_sequence) == ("5 ", "stop_sequence", "end")
        counted = await world.anthropic.messages.count_tokens(model=MODEL, messages=[ASKED])
        assert counted.input_tokens == told.usage.input_tokens
        assert len(world.requests) == 1


@in_event_loop
async def test_several_answers_are_branches_and_a_tokens_alternatives_are_itself(tmp_path) -> None:
    async with serving(tmp_path, "5", "6", "7") as world:
        said = await world.ask(ASKED, n=3, logprobs=True, top_logprobs=5)
        assert {choice.message.content for choice in said.choices} == {"5", "6", "7"}
        assert [choice.index for choice in said.choices] == [0, 1, 2]
        assert len({request.seed for request in world.requests}) == 3
        (sampled, *_) = said.choices[0].logprobs.content
        assert [(one.token, one.logprob) for one in sampled.top_logprobs] == [(sampled.token, sampled.logprob)]
        response = world.rollout.record.build_response(5, "stop", {})
        assert len(response.branches) == 2
        # Each of them is continued as itself, whichever was sampled first.
        for choice in said.choices:
            await world.ask(ASKED, choice.message, {"role": "user", "content": "next"})
            assert choice.message.content in world.read_prompt(-1)
        assert world.gateway.counters.branches == 0
        chunks = [chunk async for chunk in await world.ask(ASKED, n=2, stream=True)]
        assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}


@in_event_loop
async def test_all_answers_of_a_call_are_recorded_or_none(tmp_path) -> None:
    async with serving(tmp_path, "1 2 3 4 5 6 7 8 9", max_tokens=60) as world:
        with pytest.raises(openai.BadRequestError, match="none is left: end here"):
            await world.ask(ASKED, n=8)
        assert world.rollout.record.num_turns == 0
        # Too many to count reaches no limit.
        limit, world.rollout.limit = world.rollout.limit, None
        with pytest.raises(anthropic.BadRequestError, match="a call has more"):
            await world.anthropic.messages.count_tokens(
                model=MODEL, messages=[{"role": "user", "content": "long " * 4000}]
            )
        assert limit is not None
        assert world.rollout.limit is None


@in_event_loop
async def test_completions_continue_a_text_or_token_ids(tmp_path) -> None:
    async with serving(tmp_path, "4 is") as world:
        tokens = world.tokenizer.encode("2 + 2 =")
        for prompt in ("2 + 2 =", tokens, ["2 + 2 ="]):
            said = await world.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=8, logprobs=1)
            assert said.choices[0].text == "4 is"
            assert said.choices[0].logprobs.text_offset[0] == 0
        assert {request.tokens for request in world.requests} == {tuple(tokens)}
        with pytest.raises(openai.BadRequestError, match="echo True is not served"):
            await world.openai.completions.create(model=MODEL, prompt="2", echo=True)
        with pytest.raises(openai.BadRequestError, match="token 99999 is not one of the model's"):
            await world.openai.completions.create(model=MODEL, prompt=[5, 99999])
        await world.openai.completions.create(model=MODEL, prompt="2", n=2)
        assert world.rollout.messages == [{"role": "assistant", "content": "4 is"}]
        with pytest.raises(openai.BadRequestError, match="prompt must be one text"):
            await world.openai.completions.create(model=MODEL, prompt=["2", "3"])


@in_event_loop
async def test_what_would_change_the_policy_is_advice_if_the_run_says_so(tmp_path, caplog) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"type": "object", "required": ["a"]}}}
    async with serving(
        tmp_path, "5", 'add!{"a": 1}', '{"a": 1}', reader=Thinker(), advises=True, max_tokens=900
    ) as world:
        said = await world.ask(ASKED, tools=[TOOL], tool_choice="required", temperature=0, top_p=0.5)
        assert "2 + 3\n\nAnswer with a call of one of the tools.<|im_end|>" in world.read_prompt(0)
        # The next call has the chat without the advice, and it is the same chat.
        asked = [ASKED, said.choices[0].message, {"role": "user", "content": "add"}]
        choice = {"type": "function", "function": {"name": "add"}}
        await world.ask(*asked, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
        assert world.read_prompt(1).count("Answer with a call") == 2
        assert world.read_prompt(1).endswith(
            "add\n\nCall at most one tool.\n\nAnswer with a call of the tool add.<|im_end|>\n<|im_start|>assistant\n"
        )
        assert world.gateway.counters.branches == 0
        await world.ask({"role": "user", "content": "json"}, response_format=form)
        assert 'this schema: {"type": "object", "required": ["a"]}.' in world.read_prompt(2)
        # Whether it fits the schema is not checked: the schema is the client's.
        assert world.gateway.counters.advised == {"tool_choice": 1, "temperature": 1, "top_p": 1}
        assert world.gateway.status()["gateway_advice_not_followed"] == 3
        assert caplog.text.count("a call's temperature was advice") == 1
        message = {"role": "user", "content": "go"}
        tools = [{"name": "add", "input_schema": {"type": "object"}}]
        await world.anthropic.messages.create(
            model=MODEL, max_tokens=9, messages=[message], tools=tools, tool_choice={"type": "any"}
        )
        assert "go\n\nAnswer with a call of one of the tools." in world.read_prompt(3)


@in_event_loop
async def test_the_responses_of_openai_talk_use_tools_and_stream(tmp_path) -> None:
    texts = ('hm~add!{"a": 1}', "hm~5", "6", "7")
    tool = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
    async with serving(tmp_path, *texts, reader=Thinker()) as world:
        asking = {"model": MODEL, "instructions": "Be brief.", "tools": [tool]}
        first = await world.openai.responses.create(input="2 + 3", **asking)
        assert [item.type for item in first.output] == ["reasoning", "function_call"]
        assert (first.output[1].name, first.output[1].arguments) == ("add", '{"a": 1}')
        result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "5"}
        # The items are sent back, as a client without a state does.
        items = [{"role": "user", "content": "2 + 3"}, *[item.model_dump() for item in first.output], result]
        second = await world.openai.responses.create(input=items, store=False, **asking)
        assert second.output_text == "5"
        assert world.read_prompt(1).startswith(world.read_prompt(0) + texts[0])
        # Or the answer is named.
        third = await world.openai.responses.create(input=[result], previous_response_id=first.id, **asking)
        assert third.output_text == "6"
        assert world.read_prompt(2) == world.read_prompt(1)
        assert world.gateway.counters.branches == 0
        events = [event async for event in await world.openai.responses.create(input="go", stream=True, **asking)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "7"
        assert events[-1].response.output_text == "7"
        with pytest.raises(openai.NotFoundError, match="is not known: it must be an answer of this rollout"):
            await world.openai.responses.create(input="go", previous_response_id=second.id, **asking)
        for changes, named in (
            ({"tools": [{"type": "web_search"}]}, "'web_search' is not served: the policy calls functions alone"),
            ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "reads text alone"),
            ({"background": True}, "background True is not served"),
            ({"reasoning": {"effort": "low"}}, "reasoning.effort would change the policy"),
            ({"input": 5}, "input must be text or a list of items"),
        ):
            with pytest.raises(openai.BadRequestError, match=named):
                await world.openai.responses.create(**{"model": MODEL, "input": "go", **changes})
    async with serving(tmp_path, "5 6 7 8 9") as world:
        cut = await world.openai.responses.create(model=MODEL, input="go", max_output_tokens=2)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
