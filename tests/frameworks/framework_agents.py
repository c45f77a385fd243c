"""Agents of today's frameworks, each as its documentation writes one: two tools, and no knowledge of the gateway.

Addresses and keys come from the environment, as a run sets it. Each agent returns the number of its tools' calls.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# It would ask for prices on the internet.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
CALLS: list[str] = []
TASK = "What is 3 times the sum of 20 and 22?"


def add(first: int, second: int) -> int:
    """Add two numbers.

    Args:
        first: A number.
        second: Another number.
    """
    CALLS.append("add")
    return first + second


def multiply(first: int, second: int) -> int:
    """Multiply two numbers.

    Args:
        first: A number.
        second: Another number.
    """
    CALLS.append("multiply")
    return first * second


def count(said: Any) -> dict[str, float]:
    """Return the numbers that a test compares."""
    return {"calls": float(len(CALLS)), "said": float(bool(str(said)))}


PROGRAMS = Path(sys.prefix) / "node_modules" / ".bin"


def run(*words: str, **environment: str) -> dict[str, float]:
    """Run a program of npm, which brings its tools."""
    ended = subprocess.run(
        [PROGRAMS / words[0], *words[1:]],
        stdin=subprocess.DEVNULL,
        cwd=os.environ["HOME"],
        env=os.environ | environment,
        timeout=100,
        check=True,
        capture_output=True,
        text=True,
    )
    return {"said": float("stand-in" in ended.stdout), "letters": min(1.0, len(ended.stdout) / 100)}


PARAMETERS = {
    "type": "object",
    "properties": {"first": {"type": "integer"}, "second": {"type": "integer"}},
    "required": ["first", "second"],
}
TOOLS = {"add": add, "multiply": multiply}


def openai_chat(model: str, **row: Any) -> dict[str, float]:
    from openai import OpenAI

    client, messages = OpenAI(), [{"role": "user", "content": TASK}]
    tools = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in TOOLS]
    while True:
        said = client.chat.completions.create(model=model, messages=messages, tools=tools).choices[0].message
        messages.append(said)
        if not said.tool_calls:
            return count(said.content)
        for call in said.tool_calls:
            result = TOOLS[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


def openai_responses(model: str, **row: Any) -> dict[str, float]:
    from openai import OpenAI

    client, items = OpenAI(), [{"role": "user", "content": TASK}]
    tools = [{"type": "function", "name": name, "parameters": PARAMETERS} for name in TOOLS]
    while True:
        said = client.responses.create(model=model, input=items, tools=tools, instructions="You compute.")
        items += said.output
        calls = [item for item in said.output if item.type == "function_call"]
        if not calls:
            return count(said.output_text)
        for call in calls:
            result = TOOLS[call.name](**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": str(result)})


def openai_stream(model: str, **row: Any) -> dict[str, float]:
    """Stream responses, whose state the server holds."""
    from openai import OpenAI

    client, items, before = OpenAI(), [{"role": "user", "content": TASK}], None
    tools = [{"type": "function", "name": name, "parameters": PARAMETERS} for name in TOOLS]
    while True:
        with client.responses.stream(model=model, input=items, tools=tools, previous_response_id=before) as stream:
            said = stream.get_final_response()
        calls = [item for item in said.output if item.type == "function_call"]
        if not calls:
            return count(said.output_text)
        before, items = said.id, []
        for call in calls:
            result = TOOLS[call.name](**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": str(result)})


def anthropic_messages(model: str, **row: Any) -> dict[str, float]:
    from anthropic import Anthropic

    client, messages = Anthropic(), [{"role": "user", "content": TASK}]
    tools = [{"name": name, "input_schema": PARAMETERS} for name in TOOLS]
    while True:
        said = client.messages.create(model=model, max_tokens=1000, messages=messages, tools=tools)
        messages.append({"role": "assistant", "content": said.content})
        calls = [block for block in said.content if block.type == "tool_use"]
        if not calls:
            return count(said.content[0].text)
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": str(TOOLS[call.name](**call.input))}
            for call in calls
        ]
        messages.append({"role": "user", "content": results})


async def openai_agents(model: str, **row: Any) -> dict[str, float]:
    from agents import Agent, Runner, function_tool

    agent = Agent("Calculator", instructions="You compute.", tools=[*map(function_tool, TOOLS.values())], model=model)
    return count((await Runner.run(agent, TASK)).final_output)


async def pydantic_ai(model: str, **row: Any) -> dict[str, float]:
    """Ask for an answer of a type, which is a tool of its own that must be called."""
    from pydantic import BaseModel
    from pydantic_ai import Agent

    class Number(BaseModel):
        value: int

    agent = Agent(f"openai-chat:{model}", instructions="You compute.", tools=[*TOOLS.values()], output_type=Number)
    return count((await agent.run(TASK)).output.value)


def langgraph(model: str, **row: Any) -> dict[str, float]:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    agent = create_agent(ChatOpenAI(model=model, temperature=0), tools=[*TOOLS.values()], system_prompt="You compute.")
    return count(agent.invoke({"messages": [{"role": "user", "content": TASK}]})["messages"][-1].content)


def smolagents(model: str, **row: Any) -> dict[str, float]:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    served = OpenAIModel(model, api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    return count(ToolCallingAgent(tools=[*map(tool, TOOLS.values())], model=served).run(TASK))


def instructor(model: str, **row: Any) -> dict[str, float]:
    import instructor
    from pydantic import BaseModel

    class Sum(BaseModel):
        """The parts of a sum."""

        first: int
        second: int

    client = instructor.from_provider(f"openai/{model}")
    parts = client.chat.completions.create(response_model=Sum, messages=[{"role": "user", "content": TASK}])
    return count(multiply(3, add(parts.first, parts.second)))


def litellm(model: str, **row: Any) -> dict[str, float]:
    import litellm

    messages: list[Any] = [{"role": "user", "content": TASK}]
    tools = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in TOOLS]
    while True:
        said = litellm.completion(f"openai/{model}", messages, tools=tools, tool_choice="auto").choices[0].message
        messages.append(said)
        if not said.tool_calls:
            return count(said.content)
        for call in said.tool_calls:
            result = TOOLS[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


def google_adk(model: str, **row: Any) -> dict[str, float]:
    import asyncio

    from google.adk.agents import LlmAgent
    from google.adk.models.lite_llm import LiteLlm
    from google.adk.runners import InMemoryRunner

    agent = LlmAgent(model=LiteLlm(f"openai/{model}"), name="calculator", tools=[*TOOLS.values()])
    return count(asyncio.run(InMemoryRunner(agent).run_debug(TASK)))


async def ag2(model: str, **row: Any) -> dict[str, float]:
    from ag2 import Agent, tool
    from ag2.config import OpenAIConfig

    agent = Agent("calculator", "You compute.", config=OpenAIConfig(model=model), tools=[*map(tool, TOOLS.values())])
    return count((await agent.ask(TASK)).body)


def dspy_predict(model: str, **row: Any) -> dict[str, float]:
    """Act by text: dspy asks for its fields in a format of its own, and calls no tools of the interface."""
    import dspy

    dspy.configure(lm=dspy.LM(f"openai/{model}", cache=False))
    return count(dspy.Predict("question -> answer")(question=TASK).answer)


def mini_swe_agent(model: str, **row: Any) -> dict[str, float]:
    # It runs a command that the policy says.
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    served = LitellmModel(model_name=f"openai/{model}", cost_tracking="ignore_errors")
    texts = {"system_template": "You compute.", "instance_template": "{{task}}", "step_limit": 3}
    agent = DefaultAgent(served, LocalEnvironment(), **texts)
    agent.run(TASK)
    return {"calls": float(agent.n_calls)}


def codex(base_url: str, model: str, **row: Any) -> dict[str, float]:
    served = (
        f'model_providers.here={{name="here", base_url="{base_url}", env_key="OPENAI_API_KEY", wire_api="responses"}}'
    )
    words = ["exec", "--skip-git-repo-check", "-s", "danger-full-access", "-m", model, "-c", served]
    return run("codex", *words, "-c", "model_provider=here", TASK)


def claude_code(model: str, **row: Any) -> dict[str, float]:
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1"}
    return run("claude", "-p", TASK, "--model", model, "--dangerously-skip-permissions", **quiet)
