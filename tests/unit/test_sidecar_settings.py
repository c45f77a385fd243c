"""The sidecar's command line."""

from pathlib import Path

import pytest

from megatron_rl.errors import UsageError
from megatron_rl.sidecar.settings import parse

SCRIPTED = "--rollout-engine scripted --rollout-folder /nowhere/run"


def test_flags_become_settings_and_lists_join() -> None:
    settings = parse(f"{SCRIPTED} --reward exact=0.5 --reward f.py:g --rollout-num-engines 3".split())
    assert settings.reward.functions == ["exact=0.5", "f.py:g"]
    assert settings.rollout.num_engines == 3
    assert settings.folder == Path("/nowhere/run")
    assert settings.run == "run"
    assert settings.address == ("127.0.0.1", 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rollout-num-engines 1 --rollout-num-engines 2", "given twice, with 1 and 2"),
        ("--rollout-num-engines 0", "at least 1"),
        ("--rollout-num-engines many", "--rollout-num-engines many"),
        ("--rollout-listen 127.0.0.1:99999", "no HOST:PORT"),
        ("--rollout-devices 0 1 2 --rollout-num-engines 2", "names 3 devices"),
        ("--rollout-engine scripted --rollout-transport nccl", "does not reach a scripted engine"),
        ("--reward-timeout 0", "--reward-timeout 0: write seconds above 0"),
        ("--reward-timeout inf", "--reward-timeout inf"),
        ("--reward-memory-gib 0.01", "--reward-memory-gib 0.01: a process that functions run in needs 0.125 at least"),
        ("--reward-readable /no/such/path", "--reward-readable /no/such/path: there is no such file or folder"),
        ("--num-layers 4", "unknown flag --num-layers"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(words: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(f"{SCRIPTED} --reward exact {words}".split())


@pytest.mark.parametrize(("platform", "transport"), [("cpu", "nccl"), ("cuda", "hccl"), ("npu", "nccl")])
def test_weights_are_streamed_only_by_what_the_engines_devices_have(platform: str, transport: str) -> None:
    words = f"--rollout-folder /nowhere/run --reward exact --platform {platform} --rollout-transport {transport}"
    with pytest.raises(UsageError, match=f"--rollout-transport {transport} does not reach vLLM on {platform}"):
        parse(words.split())


def test_a_script_is_for_scripted_engines_only() -> None:
    words = "--rollout-folder run --reward exact --hf-model model --seq-length 64 --rollout-script s.json"
    with pytest.raises(UsageError, match="--rollout-script s.json is for --rollout-engine scripted, and this is vllm"):
        parse(words.split())
    assert parse(f"{SCRIPTED} --reward exact --rollout-script s.json".split()).rollout.script == Path("s.json")


def test_a_vllm_sidecar_wants_a_length() -> None:
    words = "--rollout-folder run --reward exact --hf-model model"
    with pytest.raises(UsageError, match="--rollout-max-model-len is missing"):
        parse(words.split())
    assert parse(f"{words} --seq-length 64".split()).seq_length == 64
