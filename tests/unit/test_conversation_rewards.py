"""Reward functions next to environments and agents: they judge what the policy said, its last turn as the answer."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.confined.pool import PoolSettings
from megatron_rl.environments.pool import EnvironmentPool
from megatron_rl.environments.types import OnError
from megatron_rl.gateway.chats import TemplateChats
from megatron_rl.rewards.pool import RewardPool
from megatron_rl.rewards.spec import parse_specs
from megatron_rl.shared.chat import build_decoder
from megatron_rl.shared.protocol import wire
from megatron_rl.sidecar.conversations import Conversations
from megatron_rl.sidecar.engines import GroupRequest
from megatron_rl.sidecar.evaluation import EvaluationRun
from megatron_rl.sidecar.group_maker import Counters, GroupHolder, GroupMaker, PoolScorer
from megatron_rl.tool_calls import Said, ToolCall
from tests import chat_models
from tests.agents import acting
from tests.reward_pools import in_event_loop
from tests.turns import make_turn

END = "<|im_end|>"
QUESTION = "What is 5 * 10?"
REWARD = """
import json

def seen(prompts, completions, completion_ids, **columns):
    print("SEEN", json.dumps([prompts[0], completions[0], len(completion_ids[0])]), flush=True)
    return [0.0] * len(completions)
"""
ENVIRONMENT = """
class Told:
    def reset(self, **row):
        return " Do not say #### 50."

    def step(self, completion):
        return "Wrong, it is #### 50." if "51" in completion else None

    def get_reward(self):
        return 0.0

class Tools(Told):
    def add(self, left: int) -> str:
        \"\"\"Add.

        Args:
            left: A number.
        \"\"\"
        return "#### 50"
"""
AGENT = """
import asyncio

import openai

CLIENT = openai.AsyncOpenAI(base_url="http://localhost", api_key="each rollout has its own")

async def ask(policy, model, *messages):
    said = await policy.chat.completions.create(model=model, messages=[*messages])
    return {"role": "assistant", "content": said.choices[0].message.content}

async def act(base_url, api_key, model, task, question, **row):
    policy = CLIENT.with_options(base_url=base_url, api_key=api_key)
    chat = [{"role": "user", "content": question}]
    if task == "parallel":
        await asyncio.gather(*[ask(policy, model, {"role": "user", "content": text}) for text in ("slow", "?")])
        return None
    chat.append(await ask(policy, model, *chat))
    helped = await ask(policy, model, {"role": "system", "content": "You help."}, *chat[:1])
    chat.append({"role": "user", "content": "A helper says: " + helped["content"]})
    chat.append(await ask(policy, model, *chat))
    if task == "shortened":
        await ask(policy, model, {"role": "user", "content": "In short?"}, chat[1], {"role": "user", "content": "So?"})
    return None
"""


class Engines:
    """Engines that answer the end of a chat as they are told to."""

    max_in_flight = 8

    def __init__(self, tokenizer: Any, answers: dict[str, str]) -> None:
        self.tokenizer = tokenizer
        self._answers = answers
        self.num_sampled = 0

    async def generate(self, request: GroupRequest) -> list[wire.Response]:
        asked = self.tokenizer.decode(list(request.prompt_tokens))
        text = next(
            answer for end, answer in self._answers.items() if asked.endswith(f"{end}{END}\n<|im_start|>assistant\n")
        )
        while "late" in text and self.num_sampled == 0:
            await asyncio.sleep(0.01)
        tokens = [*self.tokenizer.encode(text), chat_models.find(END)]
        self.num_sampled += len(tokens)
        return [make_turn(tokens, seed=request.seed)]


async def judge(
    folder: Path, engines: Engines, holder: GroupHolder, specs: list[str], text: Any, **columns: Any
) -> wire.Response:
    """Make a group of one response, and have real functions score it."""
    pool = RewardPool(parse_specs(specs), PoolSettings(num_workers=1, log=folder / "rewards.log"))
    await pool.start()
    try:
        tokens = wire.encode_tokens(engines.tokenizer.encode(f"<|im_start|>user\n{QUESTION}"))
        prompt = wire.Prompt(index=0, row="row:0", tokens=tokens, text=text, columns=columns)
        evaluation = wire.Evaluation(
            run="run", version=1, fingerprint="w", prompts=[prompt], group_size=1, deadline_seconds=300.0,
            sampling=wire.Sampling(max_tokens=400, max_turns=8, temperature=1.0),
        )  # fmt: skip
        maker = GroupMaker(engines, PoolScorer(pool, build_decoder(str(folder))), Counters(), None, holder)
        made: list[wire.Group] = []
        run = EvaluationRun(evaluation, maker.make_all, lambda _, groups: made.extend(groups))
        assert await run.answer(300.0) is not None
        return made[0].responses[0]
    finally:
        await pool.close()


def read_seen(folder: Path) -> list[Any]:
    (line,) = [line for line in (folder / "rewards.log").read_text().splitlines() if line.startswith("SEEN ")]
    seen: list[Any] = json.loads(line.removeprefix("SEEN "))
    return seen


async def judge_agent(folder: Path, engines: Engines, specs: list[str], text: Any, **columns: Any) -> wire.Response:
    async with acting(folder, AGENT, engines=engines, chats=TemplateChats(engines.tokenizer)) as world:
        return await judge(folder, engines, world.build_rollouts(None, ["gsm8k"]), specs, text, **columns)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    chat_models.save_tokenizer(tmp_path, chat_models.HERMES, END)
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path


def load(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


ANSWERS = {
    f"<|im_start|>user\n{QUESTION}": "Perhaps 40.", "says: Perhaps 40.": "So it is 50.", "So?": "50.", "slow": "late",
    "<|im_start|>user\n?": "soon",
}  # fmt: skip


@pytest.mark.parametrize("is_chat", [False, True])
@in_event_loop
async def test_the_last_turn_of_an_agent_is_judged_though_its_helpers_branch_is_laid_out_after_it(
    folder: Path, is_chat: bool
) -> None:
    engines = Engines(load(folder), ANSWERS)
    text = [{"role": "user", "content": QUESTION}] if is_chat else QUESTION
    specs = ["gsm8k", "length:1,1000", f"{folder / 'reward.py'}:seen"]
    response = await judge_agent(folder, engines, specs, text, answer="50", task="ask", question=QUESTION)
    assert response.branches
    assert response.components["gsm8k"] == 1.0
    assert response.components["length"] == pytest.approx(-(engines.num_sampled - 1) / 1000)
    said = [
        {"role": "assistant", "content": "Perhaps 40."},
        {"role": "user", "content": "A helper says: Perhaps 40."},
        {"role": "assistant", "content": "So it is 50."},
    ]
    assert read_seen(folder) == [text, said if is_chat else "So it is 50.", engines.num_sampled]


@pytest.mark.parametrize(("task", "said"), [("shortened", "50."), ("parallel", "late")])
@in_event_loop
async def test_messages_of_an_agents_last_chat_begin_with_the_first_that_the_policy_said_in_it(
    folder: Path, task: str, said: str
) -> None:
    specs, text = [f"{folder / 'reward.py'}:seen"], [{"role": "user", "content": QUESTION}]
    await judge_agent(folder, Engines(load(folder), ANSWERS), specs, text, task=task, question=QUESTION)
    # The chat quotes an earlier answer after another question: there it is the agent's.
    assert read_seen(folder)[1] == [{"role": "assistant", "content": said}]


class Caller:
    """A reader that finds one call, in a turn with an exclamation mark."""

    async def read(self, tokens, text: str, tools) -> Said:
        return Said("", "hm", (ToolCall("call-1", "add", '{"left": 1}'),)) if "!" in text else Said(text, None, ())


async def judge_environment(
    folder: Path, name: str, specs: list[str], answers: dict[str, str], text: Any
) -> tuple[wire.Response, Engines]:
    (folder / "told.py").write_text(ENVIRONMENT)
    engines, chats = Engines(load(folder), answers), TemplateChats.load(str(folder))
    environments = EnvironmentPool(EnvironmentConfig(source=f"{folder / 'told.py'}:{name}", workers=1), PoolSettings())
    offered = await environments.start()
    holder = Conversations(engines, environments, chats, OnError(stops=True), offered, Caller(), has_functions=True)
    chats.check_prompt = lambda prompt: None  # type: ignore[method-assign]
    try:
        return await judge(folder, engines, holder, specs, text, answer="50"), engines
    finally:
        await environments.close()


@in_event_loop
async def test_what_an_environment_says_earns_the_policy_nothing(folder: Path) -> None:
    answers = {f"{QUESTION} Do not say #### 50.": "51", "it is #### 50.": "Still 52."}
    chat = [{"role": "user", "content": QUESTION}]
    specs = ["gsm8k", "length:1,1000", f"{folder / 'reward.py'}:seen"]
    response, engines = await judge_environment(folder, "Told", specs, answers, chat)
    assert response.components["gsm8k"] == 0.0
    assert response.components["length"] == pytest.approx(-(engines.num_sampled - 1) / 1000)
    said = [
        {"role": "assistant", "content": "51"},
        {"role": "user", "content": "Wrong, it is #### 50."},
        {"role": "assistant", "content": "Still 52."},
    ]
    assert read_seen(folder) == [chat, said, engines.num_sampled]


@in_event_loop
async def test_calls_of_tools_and_their_results_are_messages_as_openai_writes_them(folder: Path) -> None:
    answers = {f"{QUESTION} Do not say #### 50.": "add!", "#### 50\n</tool_response>": "Then 52."}
    specs = ["gsm8k", f"{folder / 'reward.py'}:seen"]
    response, _ = await judge_environment(folder, "Tools", specs, answers, [{"role": "user", "content": QUESTION}])
    assert response.components["gsm8k"] == 0.0
    call = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"left": 1}'}}
    assert read_seen(folder)[1] == [
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "name": "add", "tool_call_id": "call-1", "content": "#### 50"},
        {"role": "assistant", "content": "Then 52."},
    ]
