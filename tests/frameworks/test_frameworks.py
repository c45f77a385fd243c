"""Agents of today's frameworks, unmodified, through the gateway: a stand-in policy calls each of their tools once.

`make test-frameworks` runs it.
"""

import os
from pathlib import Path

import pytest

from megatron_rl.cli import main
from megatron_rl.errors import ExitCode

PYTHON = os.environ.get("FRAMEWORKS_PYTHON")
AGENTS = Path(__file__).with_name("framework_agents.py")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="needs the frameworks: make test-frameworks"),
]
# dspy's form of an answer.
FIELDS = "[[ ## answer ## ]]\n126\n[[ ## completed ## ]]"
# What each comes to: calls of the policy, branches of them, calls of tools, and what only advice can serve.
OUTCOMES: dict[str, tuple[int, int, int, str]] = {
    "openai_chat": (3, 0, 2, ""),
    "openai_responses": (3, 0, 2, ""),
    "openai_stream": (3, 0, 2, ""),
    "anthropic_messages": (3, 0, 2, ""),
    "openai_agents": (3, 0, 2, ""),
    "pydantic_ai": (3, 0, 2, "tool_choice"),
    "langgraph": (3, 0, 2, "temperature"),
    # It rewrites calls and results as texts.
    "smolagents": (3, 2, 2, "tool_choice"),
    "instructor": (1, 0, 2, "tool_choice"),
    "litellm": (3, 0, 2, ""),
    "google_adk": (3, 0, 2, ""),
    "ag2": (3, 0, 2, ""),
    "dspy_predict": (1, 0, 0, ""),
    "mini_swe_agent": (3, 0, 3, ""),
}
# Programs of npm, which have many tools; Claude Code ends where it cannot read /proc/self.
PROGRAMS = {"codex": ("tools", []), "claude_code": ("output_config.effort", ["--reward-confine", "off"])}


def find_python(name: str) -> str:
    """Return the python of the environment of an agent."""
    return os.environ["AG2_PYTHON"] if name == "ag2" else str(PYTHON)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_npm_acts_through_the_gateway_as_it_is(name: str, capfd) -> None:
    advised, words = PROGRAMS[name]
    words = [*words, "--rollout-agent-python", str(PYTHON), "--rollout-env-max-turns", "60"]
    assert main(["try-agent", f"{AGENTS}:{name}", *words, "--rollout-gateway-advise"]) == ExitCode.OK
    printed = capfd.readouterr().out
    assert f"calls, 0 of them branches, {advised} not followed" in printed
    assert "said 1" in printed.splitlines()[-1]


@pytest.mark.parametrize("name", OUTCOMES)
def test_an_agent_of_a_framework_acts_through_the_gateway_as_it_is(name: str, capfd) -> None:
    num_calls, num_branches, num_tools, advised = OUTCOMES[name]
    words = ["try-agent", f"{AGENTS}:{name}", "--rollout-agent-python", find_python(name)]
    words += ["--answer", FIELDS] if name == "dspy_predict" else []
    assert main([*words, "--rollout-gateway-advise"]) == ExitCode.OK
    printed = capfd.readouterr().out
    counted = "1 call" if num_calls == 1 else f"{num_calls} calls"
    assert f"{counted}, {num_branches} of them branches" in printed
    assert f"calls {num_tools}" in printed.splitlines()[-1]
    # Without advice it is refused for that alone, or not at all.
    is_served = main(words) == ExitCode.OK
    assert is_served == (not advised)
    if advised:
        assert f"{advised} " in (printed := "".join(capfd.readouterr()))
        assert "or start the run with --rollout-gateway-advise" in printed
        # The refusal names the framework's own setting.
        assert {"langgraph": "langchain", "pydantic_ai": "pydantic-ai"}.get(name, name) in printed
