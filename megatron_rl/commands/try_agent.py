"""`megatron-rl try-agent FILE:FUNCTION`: one rollout of an agent through the gateway, without an engine.

A stand-in for the policy calls each tool that the agent offers once, with arguments made from its schema, and then
answers in text. The agent runs in the process that a run would give it. The command prints its chat, the calls that
were refused, and its reward.
"""

import argparse
import asyncio
import json
import logging
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.config.rollout import DataConfig
from megatron_rl.confined.pool import PoolSettings
from megatron_rl.environments.types import OnError
from megatron_rl.errors import ExitCode, count_noun
from megatron_rl.gateway.chats import Chats, ChatTooLong, TemplateChats
from megatron_rl.shared.protocol import wire
from megatron_rl.sidecar.agent_rollouts import AgentRollouts, GatewayOpening
from megatron_rl.sidecar.engines import GroupRequest
from megatron_rl.tool_calls import JSON, Said, ToolCall
from megatron_rl.trainer.data.prompt_files import read_rows

_LOG, _NUM_LINES = "rewards.log", 40
_ANSWER = "This is the answer of the stand-in policy."
_EXAMPLES = {"string": "text", "boolean": True, "null": None}
# Schemas may refer to themselves.
_DEEPEST = 8


class PrintedChats:
    """Chats whose new messages are printed; without a model, each byte is a token. Satisfies `Chats`."""

    def __init__(self, chats: Chats | None) -> None:
        self._chats = chats
        self.num_tokens = None if chats is None else chats.num_tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode() if self._chats is None else self._chats.decode(tokens)

    def encode(self, text: str, *, most: int) -> list[int]:
        _print_messages("a text that is continued", [{"role": "text", "content": text}])
        return list(text.encode()) if self._chats is None else self._chats.encode(text, most=most)

    def render(self, messages: Sequence[JSON], tools: Sequence[JSON], *, most: int) -> list[int]:
        names = ", ".join(tool["function"]["name"] for tool in tools) or "none"
        _print_messages(f"a chat from the start; tools: {names}", messages)
        return _encode(messages, tools, most) if self._chats is None else self._chats.render(messages, tools, most=most)

    def extend(
        self, messages: Sequence[JSON], tools: Sequence[JSON], said: Sequence[int], calls: Sequence[JSON], *, most: int
    ) -> list[int]:
        _print_messages("the chat continues", messages)
        if self._chats is None:
            return _encode(messages, (), most)
        return self._chats.extend(messages, tools, said, calls, most=most)


class StandIn:
    """The policy: its turns call each tool once, then answer in text. Satisfies `Sampler` and `Reader`."""

    def __init__(self, answer: str) -> None:
        self._answer = answer
        self._called: set[str] = set()

    async def generate(self, request: GroupRequest) -> list[wire.Response]:
        whole = list(self._answer.encode())
        tokens = whole[: request.sampling.max_tokens]
        return [
            wire.Response(
                tokens=wire.encode_tokens(tokens),
                log_probs=wire.encode_log_probs([-1.0] * len(tokens)),
                finish_reason="stop" if len(tokens) == len(whole) else "length",
                seed=request.seed,
                engine="stand-in",
                spans=[wire.VersionSpan(version="0", start=0, end=len(tokens))],
                fingerprint="stand-in",
            )
        ]

    async def read(self, tokens: Sequence[int], text: str, tools: Sequence[JSON]) -> Said:
        functions = [tool["function"] for tool in tools]
        function = next((function for function in functions if function["name"] not in self._called), None)
        if function is None:
            print(f"  policy: {self._answer}")
            return Said(self._answer, None, ())
        schema = function.get("parameters") or {"properties": {}}
        name, arguments = function["name"], json.dumps(make_example(schema, schema))
        self._called.add(name)
        print(f"  policy: calls {name} with {arguments}")
        return Said("", None, (ToolCall(f"call-{len(self._called)}", name, arguments),))


class RefusalPrinter(logging.Handler):
    """Prints each refusal of the gateway once: an agent that ends before its first turn begins again."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self._printed:
            self._printed.add(text)
            print(f"  {text}")


def make_example(schema: Any, root: JSON, depth: int = 0) -> Any:
    """Make a value from a part of a JSON schema: its default, its first choice, or an example of its type."""
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return "text"
    if isinstance(reference := schema.get("$ref"), str):
        part: Any = root
        for name in reference.removeprefix("#/").split("/"):
            part = part.get(name) if isinstance(part, dict) else None
        return make_example(part, root, depth + 1)
    for name in ("const", "default"):
        if name in schema:
            return schema[name]
    if choices := schema.get("enum") or schema.get("examples"):
        return choices[0]
    if parts := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        return make_example(parts[0], root, depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return {name: make_example(part, root, depth + 1) for name, part in schema.get("properties", {}).items()}
    if kind == "array":
        return [make_example(schema.get("items", {}), root, depth + 1)] * schema.get("minItems", 1)
    return schema.get("minimum", 1) if kind in ("integer", "number") else _EXAMPLES.get(kind)


def main(argv: Sequence[str]) -> int:
    arguments = _parse(argv)
    logger, printer = logging.getLogger("megatron_rl.gateway.application"), RefusalPrinter()
    logger.setLevel(logging.DEBUG)
    logger.addHandler(printer)
    with tempfile.TemporaryDirectory() as folder:
        try:
            response = asyncio.run(_act(arguments, Path(folder)))
        finally:
            logger.removeHandler(printer)
            _print_log(Path(folder, _LOG))
    parts = ", ".join(f"{name} {value:g}" for name, value in response.components.items())
    told = f"reward {response.reward or 0:g} ({parts})" if parts else "no reward of its own: a run needs --reward"
    print(f"{told}, finish reason {response.finish_reason}")
    return ExitCode.OK


def _print_log(file: Path) -> None:
    """Print what the agent has printed, and its tracebacks."""
    if file.is_file() and (text := file.read_text(errors="replace").strip()):
        last = "\n".join(text.splitlines()[-_NUM_LINES:])
        print(f"the end of the agent's own output, which a run writes to rewards.log\n{textwrap.indent(last, '  ')}")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megatron-rl try-agent", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("agent", metavar="FILE:FUNCTION", help="the agent, as for --rollout-agent")
    parser.add_argument("--prompts", type=Path, help="the file whose first row the agent gets; without it, no columns")
    parser.add_argument("--prompt-chat", action="store_true", help="as in a run")
    parser.add_argument("--hf-model", help="the model whose chat template and tokenizer write the chats")
    parser.add_argument("--answer", default=_ANSWER, help="the text that the stand-in answers with")
    parser.add_argument("--rollout-agent-python", type=Path, help="as in a run")
    parser.add_argument("--rollout-agent-network", choices=("gateway", "any"), default="gateway", help="as in a run")
    parser.add_argument("--reward-confine", choices=("auto", "require", "off"), default="auto", help="as in a run")
    parser.add_argument("--rollout-gateway-advise", action="store_true", help="as in a run")
    parser.add_argument("--rollout-env-max-turns", type=int, default=EnvironmentConfig().max_turns, help="as in a run")
    parser.add_argument("--rollout-max-tokens", type=int, default=1 << 20, help="as in a run; by default 1,048,576")
    return parser.parse_args(argv)


async def _act(arguments: argparse.Namespace, folder: Path) -> wire.Response:
    prompt = _read_prompt(arguments)
    config = EnvironmentConfig(
        agent=arguments.agent,
        agent_python=arguments.rollout_agent_python,
        agent_network=arguments.rollout_agent_network,
        gateway_advises=arguments.rollout_gateway_advise,
        workers=1,
    )
    chats = None if arguments.hf_model is None else TemplateChats.load(arguments.hf_model)
    policy = StandIn(arguments.answer)
    opening = GatewayOpening.open(config, PoolSettings(log=folder / _LOG, confine=arguments.reward_confine))
    gateway = opening.build(PrintedChats(chats), policy, reads_tools=True)
    sampling = wire.Sampling(max_tokens=arguments.rollout_max_tokens, max_turns=arguments.rollout_env_max_turns)
    try:
        await opening.agents.start()
        async with opening.serve(gateway):
            rollouts = AgentRollouts(policy, opening.agents, gateway, OnError(stops=True), (), needs_rewards=False)
            (transcript,) = await rollouts.hold_group(GroupRequest("try", (), 1, 0, sampling), prompt)
            # What a run would train on, and what it would not follow.
            counters = gateway.counters
            advised = "".join(f", {name} not followed" for name in counters.advised)
            print(f"{count_noun(counters.calls, 'call')}, {counters.branches} of them branches{advised}")
            return transcript.response
    finally:
        opening.listener.close()
        await opening.agents.close()


def _read_prompt(arguments: argparse.Namespace) -> wire.Prompt:
    """Return the first row, or one without columns."""
    if arguments.prompts is None:
        return wire.Prompt(index=0, row="", tokens=b"", text="", columns={})
    row = read_rows([arguments.prompts], DataConfig())[0]
    is_text = arguments.prompt_chat and isinstance(row.prompt, str)
    text = [{"role": "user", "content": row.prompt}] if is_text else row.prompt
    return wire.Prompt(index=0, row=row.identity, tokens=b"", text=text, columns=row.columns)


def _encode(messages: Sequence[JSON], tools: Sequence[JSON], most: int) -> list[int]:
    tokens = list(json.dumps([*tools, *messages]).encode())
    if len(tokens) > most:
        raise ChatTooLong
    return tokens


def _print_messages(title: str, messages: Sequence[JSON]) -> None:
    print(title)
    for message in messages:
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = "".join(f" calls {function['name']} with {function['arguments']}" for function in functions)
        print(f"  {message['role']}: {message['content']}{calls}")
