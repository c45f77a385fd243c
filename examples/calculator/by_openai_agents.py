"""An agent of openai-agents with the calculator as its tool; address, key and model are the rollout's."""

from typing import Any

import agents
import numpy  # noqa: F401
import openai.resources.chat
from calculator import compute

# Each rollout would make a client, and import what its calls use, which takes longer than the calls.
agents.set_default_openai_client(openai.AsyncOpenAI(), use_for_tracing=False)
agents.set_default_openai_api("chat_completions")
agents.set_tracing_disabled(True)


@agents.function_tool
def calculate(expression: str) -> str:
    """Compute the value of two whole numbers with +, - or * between them, in six digits."""
    return compute(expression)


async def act(model: str, prompt: list[Any], answer: str, **row: Any) -> float:
    agent = agents.Agent("Calculator", tools=[calculate], model=model)
    try:
        result = await agents.Runner.run(agent, prompt)
    except agents.ModelBehaviorError:
        return 0.0
    return float(result.final_output == answer)
