"""Conversations in which the policy calls tools, and the reader that asks a process of parsers."""

import asyncio
import contextlib
import json
import os
import stat
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers

from megatron_rl.config.settings import DataConfig
from megatron_rl.environments.types import Description, OnError
from megatron_rl.errors import InputError, PlatformError, UsageError
from megatron_rl.gateway.chats import NumberChats, NumberReader, TemplateChats, write_results
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.turns import ENVIRONMENT, mask_sampled
from megatron_rl.sidecar.conversations import Conversations
from megatron_rl.sidecar.settings import parse
from megatron_rl.sidecar.user_environments import check_offered, choose_reader
from megatron_rl.sidecar.vllm.reader import Parsers, VllmReader, suggest_parser
from megatron_rl.tool_calls import JSON, PlainReader, Said, ToolCall
from megatron_rl.trainer.data.prompts import read_prompts, tokenize_prompts
from tests import chat_models, command_lines
from tests.reward_pools import in_event_loop
from tests.unit.test_conversations import PROMPT, REQUEST, Engines, Pool, Talk

ADD: JSON = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"properties": {"a": {}, "b": {}}}},
}
WELL = Said("well", None, ())


class ToolTalk(Talk):
    """A conversation that also answers calls."""

    def __init__(self, opening: str | None, answers: Sequence[Any], results: Sequence[str]) -> None:
        super().__init__(opening, answers)
        self.used: list[tuple[str, str]] = []
        self._results = list(results)

    async def use(self, name: str, arguments: str) -> str:
        self.used.append((name, arguments))
        return self._results.pop(0)


class Reader:
    """A reader that reads what it is told to."""

    def __init__(self, *read: Said) -> None:
        self.asked: list[tuple[list[int], str, Sequence[JSON]]] = []
        self._read = list(read)

    async def read(self, tokens: Sequence[int], text: str, tools: Sequence[JSON]) -> Said:
        self.asked.append((list(tokens), text, tools))
        return self._read.pop(0)


def hold(talk: Talk, reader: Reader | None, has_step: bool = False) -> wire.Response:
    conversations = Conversations(
        Engines(), Pool(talk), NumberChats(), OnError(reward=0.0), Description("Sums", True, has_step, (ADD,)), reader
    )
    request = type(REQUEST)(**{**vars(REQUEST), "group_size": 1, "sampling": wire.Sampling(max_tokens=40, max_turns=4)})
    (transcript,) = asyncio.run(conversations.hold_group(request, PROMPT))
    return transcript.response


def test_each_call_of_a_turn_is_answered_in_order_and_a_turn_without_one_ends_the_conversation() -> None:
    first = ToolCall("1", "add", '{"a": 1}')
    second = ToolCall("2", "add", '{"a": 2}')
    talk = ToolTalk("9", [], ["20", "21 22", "23"])
    reader = Reader(Said("", None, (first, second)), Said("so", None, (first,)), WELL)
    response = hold(talk, reader)
    assert talk.used == [("add", '{"a": 1}'), ("add", '{"a": 2}'), ("add", '{"a": 1}')]
    assert talk.heard == []
    assert response.finish_reason == "stop"
    tokens = wire.decode_tokens(response.tokens)
    assert tokens[~mask_sampled(response)].tolist() == [9, 20, 21, 22, 23]
    assert [span.version == ENVIRONMENT for span in response.spans] == [True, False, True, False, True, False]
    # The reader is given the turn as it was sampled, and the tools.
    assert reader.asked[0] == (tokens[1:3].tolist(), " ".join(map(str, tokens[1:3])), (ADD,))


def test_text_is_answered_by_step_beside_tools_and_without_thoughts() -> None:
    talk = ToolTalk(None, ["20", None], ["30"])
    reader = Reader(Said("seven", "hm", ()), Said("", None, (ToolCall("1", "add", "{}"),)), Said("eight", None, ()))
    response = hold(talk, reader, has_step=True)
    assert (talk.heard, talk.used) == (["seven", "eight"], [("add", "{}")])
    assert response.finish_reason == "stop"


def test_scripted_engines_call_a_tool_with_the_tokens_of_a_turn() -> None:
    read = NumberReader().read
    assert asyncio.run(read([4, 5, 6, 7], "4 5 6 7", [ADD])).tool_calls == (
        ToolCall("call0", "add", json.dumps({"a": 5, "b": 6})),
    )
    assert asyncio.run(read([3, 5], "3 5", [ADD])) == Said("3 5", None, ())
    results = write_results([call := ToolCall("1", "add", "{}")], ["12 no such"])
    assert NumberChats().follow(PROMPT, results, [1], [call]) == [12, 2, 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_models.save_tokenizer(tmp_path_factory.mktemp("hermes"), chat_models.HERMES, "<|im_end|>")


def test_a_conversation_with_tools_has_the_tokens_that_the_template_gives_the_whole_chat(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = TemplateChats.load(str(folder))
    texts.offer([ADD])
    chat = [{"role": "user", "content": "2 + 3"}]
    function = {"name": "add", "arguments": {"a": 2}}
    said = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    whole = [*chat, said, {"role": "tool", "content": "5"}]
    rendered = tokenizer.apply_chat_template(whole, tools=[ADD], tokenize=False, add_generation_prompt=True)
    expected = tokenizer.encode(rendered, add_special_tokens=False)
    head = tokenizer.encode(rendered[: rendered.index("2 + 3") + 5], add_special_tokens=False)
    prompt = wire.Prompt(index=0, row="", tokens=wire.encode_tokens(head), text=chat)
    texts.check_prompt(prompt)
    call = ToolCall("1", "add", '{"a": 2}')
    results = write_results([call], ["5"])
    turn = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    sampled = [*tokenizer.encode(turn), chat_models.find("<|im_end|>")]
    assert [*head, *texts.open(prompt, None), *sampled, *texts.follow(prompt, results, sampled, [call])] == expected
    # Another end of the turn stays, and the template's follows.
    assert texts.follow(prompt, results, [*sampled[:-1], 7], [call])[0] == chat_models.find("<|im_end|>")
    bare = tokenizer.encode("<|im_start|>user\n2 + 3", add_special_tokens=False)
    with pytest.raises(InputError, match="prompt 0 does not have the tools"):
        texts.check_prompt(wire.Prompt(index=0, row="", tokens=wire.encode_tokens(bare), text=chat))
    with pytest.raises(InputError, match="plain text, and tools need a chat: add --prompt-chat"):
        texts.check_prompt(wire.Prompt(index=0, row="", tokens=wire.encode_tokens(bare), text="2 + 3"))


def test_the_trainer_tells_the_policy_of_the_tools_and_the_sidecar_knows_its_prompts(folder: Path, tmp_path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "2 + 3"}) + "\n")
    sizes: dict[str, int] = {"seed": 0, "longest": 500, "vocab_size": chat_models.VOCAB_SIZE}

    def read(tools: Sequence[JSON], chat: bool = True) -> wire.Prompt:
        config = DataConfig(prompts=[rows], chat=chat)
        given = {**sizes, "has_environments": True, "tools": tools}
        return tokenize_prompts(read_prompts(config), config, folder, **given).take(1)[0]  # type: ignore[arg-type]

    texts = TemplateChats.load(str(folder))
    texts.check_prompt(read([]))
    texts.offer([ADD])
    texts.check_prompt(read([ADD]))
    other = {"type": "function", "function": {**ADD["function"], "name": "sum"}}
    for tools in ([], [other]):
        with pytest.raises(InputError, match="does not have the tools"):
            texts.check_prompt(read(tools))
    with pytest.raises(InputError, match="has plain text as its prompt, and the tools of --rollout-env are for chats"):
        read([ADD], chat=False)


def test_a_model_without_calls_in_its_template_is_refused_and_a_missing_parser_is_named(tmp_path, folder: Path) -> None:
    chat_models.save_tokenizer(tmp_path, chat_models.CHATML, "<|im_end|>")
    with pytest.raises(InputError, match="chat template of --hf-model cannot write calls of tools"):
        TemplateChats.load(str(tmp_path)).offer([ADD])
    offered = Description("Sums", True, False, (ADD,))
    model = command_lines.folder(folder, command_lines.QWEN3)
    words = f"--rollout-folder run --platform cpu --seq-length 64 --hf-model {model} --rollout-env {__file__}:ToolTalk"
    with pytest.raises(UsageError, match=r"Sums has tools \(add\), and --rollout-tool-parser is missing: write hermes"):
        check_offered(offered, parse(words.split()))
    for more in ("--rollout-tool-parser hermes", "--rollout-engine scripted"):
        check_offered(offered, parse([*words.split(), *more.split()]))
    assert isinstance(choose_reader(TemplateChats.load(str(folder)), Description("Game", True), None), PlainReader)
    assert isinstance(choose_reader(NumberChats(), offered, None), NumberReader)
    assert suggest_parser("{{ m.content }}") is None


FAKE = """#!/usr/bin/env python3
import json, os, sys, time
setup = json.loads(sys.stdin.readline())
if setup["tool_parser"] == "unknown":
    print(json.dumps({"refused": "--rollout-tool-parser unknown must be a parser of vLLM"}), flush=True)
    sys.exit()
if setup["tool_parser"] == "dies":
    sys.exit(3)
print(json.dumps({"ready": os.getpid()}), flush=True)
for line in sys.stdin:
    turn = json.loads(line)
    tokens, number = turn["tokens"], turn["number"]
    if tokens[0] == 1: time.sleep(600)
    if tokens[0] == 2: sys.exit(4)
    if tokens[0] == 3: print(json.dumps({"number": number, "error": "ValueError: no"}), flush=True); continue
    call = ["1", "add", str(os.getpid())]
    print(json.dumps({"number": number, "content": "c", "reasoning": "r", "calls": [call] * len(tokens)}), flush=True)
"""


@pytest.fixture
def python(tmp_path: Path) -> str:
    """Make a program that stands for a Python with vLLM."""
    program = tmp_path / "python"
    program.write_text(FAKE)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


@contextlib.asynccontextmanager
async def reading(python: str, tool: str, folder: Path, seconds: float = 20.0) -> AsyncIterator[VllmReader]:
    reader = VllmReader(python, Parsers(tool, None, folder), folder / "log", seconds=seconds)
    try:
        await reader.start()
        yield reader
    finally:
        await reader.close()


@in_event_loop
async def test_a_turn_whose_parser_fails_is_text_and_the_others_are_read(python: str, tmp_path: Path, caplog) -> None:
    turns = [[5, 6], [3], [3], [1], [7], [2], [8]]
    async with reading(python, "hermes", tmp_path, seconds=2.0) as reader:
        read = await asyncio.gather(*(reader.read(turn, "text", [ADD]) for turn in turns))
    text = Said("text", None, ())
    assert [said for said, turn in zip(read, turns, strict=True) if turn[0] in (1, 2, 3)] == [text] * 4
    good = [read[0], read[4], read[6]]
    assert [(said.content, said.reasoning, len(said.tool_calls)) for said in good] == [
        ("c", "r", 2), ("c", "r", 1), ("c", "r", 1)
    ]  # fmt: skip
    # Each process is another one, and none is left.
    processes = [int(said.tool_calls[0].arguments) for said in good]
    assert len({*processes}) == 3
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    said = [record.getMessage() for record in caplog.records if "cannot read a turn" in record.getMessage()]
    assert [message.rpartition(": ")[2] for message in said] == [
        "no", "it gave no answer within 2 seconds", "its process ended"
    ]  # fmt: skip


@in_event_loop
async def test_a_turn_whose_caller_leaves_takes_no_other_turns_answer(python: str, tmp_path: Path) -> None:
    async with reading(python, "hermes", tmp_path) as reader:
        leaving = [asyncio.create_task(reader.read([5] * length, "text", [ADD])) for length in (7, 8)]
        # The first one has been sent, and the second one waits for it.
        await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        assert all(task.cancelled() for task in leaving)
        read = [len((await reader.read([5] * length, "text", [ADD])).tool_calls) for length in (2, 3, 4)]
        assert read == [2, 3, 4]


@in_event_loop
async def test_parsers_whose_start_is_called_off_start_again(python: str, tmp_path: Path) -> None:
    reader = VllmReader(python, Parsers("hermes", None, tmp_path), tmp_path / "log")
    starting = asyncio.create_task(reader.start())
    while reader._process is None:
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    try:
        assert len((await reader.read([5, 6], "text", [ADD])).tool_calls) == 2
    finally:
        await reader.close()


@in_event_loop
async def test_parsers_that_cannot_be_used_are_refused_at_the_start(python: str, tmp_path: Path) -> None:
    for tool, error, said in (
        ("unknown", UsageError, "--rollout-tool-parser unknown must be a parser of vLLM"),
        ("dies", PlatformError, "did not start vLLM's parsers: its process ended; its output is in"),
    ):
        with pytest.raises(error, match=said):
            async with reading(python, tool, tmp_path):
                raise AssertionError("they started")
