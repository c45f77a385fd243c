"""The file of --rollout-hosts: what it names, and all mistakes at once."""

from pathlib import Path

import pytest

from megatron_rl.config.settings import RewardConfig
from megatron_rl.confined.confinement import landlock_version
from megatron_rl.errors import UsageError
from megatron_rl.rewards.spec import build_pool_settings
from megatron_rl.rewards.types import RewardError
from megatron_rl.sidecar.hosts.kinds import find_secrets
from megatron_rl.sidecar.hosts.static import HostPlace, read_hosts
from megatron_rl.sidecar.settings import parse
from tests.reward_pools import request, score


def write(folder: Path, text: str, mode: int = 0o600) -> str:
    token = folder / "token"
    token.touch(mode=mode)
    token.write_text("0123456789abcdef\n")
    (folder / "hosts.toml").write_text(text)
    return f"static:{folder / 'hosts.toml'}"


def test_a_file_names_hosts_with_their_engines_devices_python_and_model(tmp_path):
    text = """
        token_file = "token"
        [[host]]
        address = "10.0.0.2:7100"
        [[host]]
        address = "[fd00::3]:7100"
        engines = 2
        devices = [0, 1, 2, 3]
        python = "/opt/vllm/bin/python"
        model = "/data/model"
    """
    named = read_hosts(write(tmp_path, text), tensor_parallel_size=2)
    assert named.token == "0123456789abcdef"
    assert named.hosts == (
        HostPlace("10.0.0.2:7100"),
        HostPlace("[fd00::3]:7100", 2, (0, 1, 2, 3), "/opt/vllm/bin/python", "/data/model"),
    )


def test_all_mistakes_of_a_file_are_named_at_once(tmp_path):
    text = """
        token_file = "token"
        hots = 1
        [[host]]
        address = "10.0.0.2"
        engine = 2
        [[host]]
        address = "10.0.0.3:7100"
        engines = 0
        [[host]]
        address = "10.0.0.3:7100"
        engines = 2
        devices = [0, 0]
        python = 3
    """
    with pytest.raises(UsageError) as raised:
        read_hosts(write(tmp_path, text, mode=0o644), tensor_parallel_size=1)
    problems = list(raised.value.problems)
    expected = [
        "unknown key 'hots' (the nearest is host)",
        "host 1 (10.0.0.2): unknown key 'engine' (the nearest is engines)",
        "host 1 (10.0.0.2): address must be HOST:PORT",
        "host 2 (10.0.0.3:7100): engines = 0 must be",
        "host 3 (10.0.0.3:7100): python must be",
        "host 3 (10.0.0.3:7100): devices = [0, 0] must name 2 different ones",
        "host 3 (10.0.0.3:7100) is named twice",
        "token_file: ",
    ]
    assert len(problems) == len(expected), problems
    for problem, words in zip(problems, expected, strict=True):
        assert words in problem


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no host is named"),
        ("host = 3", "no host is named"),
        ("[[host]]\naddress = 'a:1'", "token_file is missing"),
        ("token_file = 'none'\n[[host]]\naddress = 'a:1'", "No such file"),
        ("[[host", "cannot be read"),
        ("token_file = 'token'\n[[host]]\naddress = ['a:1']", "address must be HOST:PORT"),
        ("token_file = 'token'\ntls_ca = 'none'\n[[host]]\naddress = 'a:1'", "tls_ca .* cannot be used"),
        ("token_file = 'token'\ntls_ca = 3\n[[host]]\naddress = 'a:1'", "tls_ca must be"),
    ],
)
def test_a_file_without_hosts_or_token_is_refused(tmp_path, text, words):
    with pytest.raises(UsageError, match=words):
        read_hosts(write(tmp_path, text), tensor_parallel_size=1)


def test_a_sidecar_without_any_engine_and_hosts_without_vllm_are_refused(tmp_path):
    words = ["--rollout-folder", str(tmp_path), "--rollout-engine", "scripted", "--rollout-num-engines", "0"]
    with pytest.raises(UsageError, match="must be at least 1 without"):
        parse(words)
    value = write(tmp_path, "token_file = 'token'\n[[host]]\naddress = 'a:1'")
    with pytest.raises(UsageError, match="is for --rollout-engine vllm") as raised:
        parse([*words, "--rollout-hosts", value])
    assert "must be at least 1 without" not in str(raised.value)
    with pytest.raises(UsageError, match="must be one of static:FILE"):
        parse([*words, "--rollout-hosts", "somewhere"])


def test_a_function_next_to_the_file_of_hosts_does_not_read_the_token(tmp_path):
    if landlock_version() < 1:
        pytest.skip("files are hidden by Landlock")
    value = write(tmp_path, "token_file = 'token'\n[[host]]\naddress = 'a:1'")
    file = tmp_path / "mine.py"
    file.write_text(
        "from pathlib import Path\n"
        "def fn(completions, **columns):\n"
        "    return [float(len(Path(__file__).with_name('token').read_text()))] * len(completions)\n"
    )
    settings = build_pool_settings(RewardConfig(), tmp_path / "run", find_secrets(value))
    (result,) = score([f"{file}:fn"], request(), private=settings.private)
    assert isinstance(result, RewardError), result
    assert "PermissionError" in str(result)
