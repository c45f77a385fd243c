"""A graph of langgraph, of a model and the calculator as its tool; address, key and model are the rollout's."""

from typing import Any

import numpy  # noqa: F401
import openai.resources.chat  # noqa: F401
from calculator import compute
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

# Each rollout would make a client, and import what its calls use, which takes longer than the calls.
CHAT = ChatOpenAI(model="each rollout has its own")


def calculate(expression: str) -> str:
    """Compute the value of two whole numbers with +, - or * between them, in six digits."""
    return compute(expression)


def act(model: str, prompt: list[Any], answer: str, **row: Any) -> float:
    chat = CHAT.bind_tools([calculate], model=model)

    def call_model(state: MessagesState) -> dict[str, Any]:
        return {"messages": [chat.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", call_model)
    graph.add_node("tools", ToolNode([calculate], handle_tool_errors=True))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    state = graph.compile().invoke({"messages": prompt})
    return float(state["messages"][-1].content == answer)
