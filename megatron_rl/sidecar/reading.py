"""The reader of the policy's turns that a sidecar's settings ask for."""

import sys
from pathlib import Path

from megatron_rl.config.settings import RolloutConfig
from megatron_rl.environments.types import Description
from megatron_rl.errors import UsageError
from megatron_rl.gateway.chats import NumberReader, NumberTexts, Texts, TokenizerTexts
from megatron_rl.shared.records.append_file import make_private_folder
from megatron_rl.sidecar.settings import SidecarSettings
from megatron_rl.sidecar.vllm.reader import TOOL_FLAG, Parsers, VllmReader, suggest_parser
from megatron_rl.tool_calls import PlainReader, Reader

_LOG_FILE = "parsers.log"


def build_parsers(rollout: RolloutConfig, model: Path | None, logs: Path) -> VllmReader | None:
    """Build the reader with vLLM's parsers, which is to be started; return None if no flag names a parser."""
    if rollout.tool_parser is None and rollout.reasoning_parser is None:
        return None
    assert model is not None
    make_private_folder(logs)
    names = Parsers(rollout.tool_parser, rollout.reasoning_parser, model)
    return VllmReader(str(rollout.python or sys.executable), names, logs / _LOG_FILE)


def choose_reader(texts: Texts, offered: Description, parsers: VllmReader | None) -> Reader:
    """Choose the reader of turns with an environment that `check_offered` has let pass."""
    if isinstance(texts, NumberTexts):
        return NumberReader() if offered.tools else PlainReader()
    return parsers or PlainReader()


def check_offered(offered: Description, settings: SidecarSettings) -> None:
    """Raise a UsageError if nothing gives rewards, or if nothing reads calls of the environment's tools."""
    if not settings.reward.functions and not offered.has_reward:
        raise UsageError(f"{offered.name} has no method get_reward: add it, or write --reward")
    rollout = settings.rollout
    if not offered.tools or rollout.engine == "scripted" or rollout.tool_parser is not None:
        return
    assert settings.hf_model is not None
    known = suggest_parser(TokenizerTexts.load(str(settings.hf_model)).template)
    raise UsageError(
        f"{offered.name} has tools ({', '.join(tool['function']['name'] for tool in offered.tools)}), and "
        f"{TOOL_FLAG} is missing: write {known or 'the name of the parser that vLLM has for this model'}"
    )
