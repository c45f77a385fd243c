"""The sidecar as a process of its own, over scripted engines: started, asked, killed, started again, ended."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.cli import main as megatron_rl
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.client import IterationLost, RolloutClient, RolloutError
from tests.ranks import ROOT
from tests.sidecar.scripted_service import PLAN, submission, weights
from tests.sidecar.sidecar_process import SidecarProcess, alive, sidecar

SCRIPTED = ("--rollout-engine", "scripted", "--rollout-num-engines", "2", "--reward", "length:8=1")
PLACES = [(replica, index) for replica in range(2) for index in range(2)]


@contextlib.contextmanager
def submitted(folder: Path, *words: str, plan: wire.Plan = PLAN) -> Iterator[tuple[SidecarProcess, RolloutClient]]:
    """Start a sidecar of scripted engines, and submit an iteration to it."""
    with sidecar(folder, "--rollout-engine", "scripted", *words) as process, process.client() as client:
        client.take_lease("run")
        client.publish(weights(), 10)
        client.submit(submission(plan=plan))
        yield process, client


def run_iteration(client: RolloutClient, version: int, heads: list[str] | None = None) -> list[int]:
    client.publish(weights(version), 10)
    client.submit(submission(version))
    slots = [client.slot(version, *place, 10) for place in PLACES]
    head = client.complete(version).head
    if heads is not None:
        heads.append(head)
    return sorted(part.prompt_index for slot in slots for part in slot.parts)


def test_iterations_survive_a_kill_of_the_sidecar_and_the_audit_finds_nothing_wrong(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "run"
    with sidecar(folder, *SCRIPTED) as first, first.client() as client:
        client.take_lease("run")
        assert run_iteration(client, 0) == list(range(8))
        client.publish(weights(1), 10)
        client.submit(submission(1))
        before = client.slot(1, 0, 0, 10)
        processes = first.tree()
        first.kill()
        deadline = time.monotonic() + 60
        while alive(processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert alive(processes) == []
    with sidecar(folder, *SCRIPTED) as second, second.client() as client:
        client.use_lease(1)
        with pytest.raises(RolloutError, match="409"):
            client.slot(1, 0, 0, 1)
        client.take_lease("run")
        client.publish(weights(1), 10)
        client.submit(submission(1))
        assert client.slot(1, 0, 0, 10) == before
        assert client.status()["counters"]["reused"] >= len(before.parts)
        for place in PLACES:
            client.slot(1, *place, 10)
        client.complete(1)
        assert run_iteration(client, 2) == list(range(8))
        assert second.end() == 0
    assert megatron_rl(["audit", str(folder)]) == 0
    assert "3 of 4 iterations complete, 0 breaches" in capsys.readouterr().out


@pytest.mark.each_change
def test_the_head_that_complete_returns_proves_later_that_the_log_is_unchanged(tmp_path: Path, capsys) -> None:
    folder, heads = tmp_path / "run", []
    with sidecar(folder, *SCRIPTED) as process, process.client() as client:
        client.take_lease("run")
        run_iteration(client, 0, heads)
        run_iteration(client, 1, heads)
        # The answer may have been lost: it may be asked for again.
        assert client.complete(1).head == heads[1] != heads[0]
        assert process.end() == 0
    lines = (folder / "audit.jsonl").read_bytes().splitlines(keepends=True)
    assert json.loads(lines[-1])["hash"] == heads[1]
    assert json.loads(lines[-1])["event"] == "complete"
    words = ["audit", str(folder), "--head", heads[0], "--head", heads[1]]
    assert megatron_rl(words) == 0
    assert f"lines 1 to {len(lines)} are unchanged" in capsys.readouterr().out
    (folder / "audit.jsonl").write_bytes(b"".join(lines[:-1]))
    assert megatron_rl(["audit", str(folder)]) == 0
    assert megatron_rl(words) == 5
    assert "head not found" in capsys.readouterr().out


def test_a_sidecar_is_private_listens_once_and_says_who_waits_for_what(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with sidecar(folder, *SCRIPTED) as process, process.client() as client:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "token").stat().st_mode & 0o777 == 0o600
        listening = [
            (connection.laddr.ip, p.pid)
            for p in process.tree()
            for connection in p.net_connections("tcp")
            if connection.status == "LISTEN"
        ]
        assert listening == [("127.0.0.1", process.process.pid)]
        token = (folder / "token").read_text().strip()
        for started in process.tree():
            assert token not in " ".join(started.cmdline())
        os.kill(process.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 60
        while '"slots_waited_for"' not in process.output.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert '"slots_waited_for"' in process.output.read_text()
        client.take_lease("run")
        assert run_iteration(client, 0) == list(range(8))
        open_to_others = {path.name for path in folder.rglob("*") if path.is_file() and path.stat().st_mode & 0o077}
        assert not open_to_others
        metrics = client._call("GET", "/metrics").text
        assert 'megatron_rl_rollout_iteration_groups{progress="claimed"} 8.0' in metrics
        assert client._call("POST", "/v1/engines", params={"count": 1}).json()["engines"]
        client.shutdown()
        assert process.process.wait(20) == 0


def run_to_its_end(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "megatron_rl.sidecar", "--rollout-folder", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, check=False)


@pytest.mark.each_change
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--rollout-engine", "scripted"), 2, "--reward is missing"),
        (("--rollout-engine", "scripted", "--reward", "no.py:f"), 2, "no.py"),
        (("--rollout-num-engins", "2"), 2, "the nearest is --rollout-num-engines"),
        (("--reward", "length:8"), 2, "--hf-model is missing"),
        ((*SCRIPTED, "--rollout-listen", "127.0.0.1"), 2, "must be HOST:PORT"),
        ((*SCRIPTED, "--rollout-devices", "0"), 2, "must name 2 devices"),
        ((*SCRIPTED, "--reward-on-error", "perhaps"), 2, "perhaps"),
        ((*SCRIPTED, "--rollout-script", "none.json"), 2, "none.json cannot be read"),
        ((*SCRIPTED, "--reward-environment", "NO_SUCH"), 2, "--reward-environment NO_SUCH: it is not set here"),
        ((*SCRIPTED, "--reward-environment", "HOME"), 2, "--reward-environment HOME: functions have a value of"),
    ],
)
def test_a_wrong_flag_ends_the_sidecar_at_once_and_says_what_to_write(
    words, code: int, message: str, tmp_path: Path
) -> None:
    ended = run_to_its_end(tmp_path / "run", *words)
    assert message in ended.stderr
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr


@pytest.mark.each_change
def test_a_second_sidecar_of_the_same_run_is_refused(tmp_path: Path) -> None:
    with sidecar(tmp_path / "run", *SCRIPTED):
        ended = run_to_its_end(tmp_path / "run", *SCRIPTED)
        assert ended.returncode != 0
        assert "Traceback" not in ended.stderr


@pytest.mark.each_change
def test_the_rewards_of_the_slots_are_those_of_the_function(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def count(prompts, completions, completion_ids, **columns):\n    return [len(c) for c in completion_ids]\n"
    )
    with submitted(tmp_path / "run", "--reward", f"{reward}:count=2") as (_, client):
        for place in PLACES:
            for part in client.slot(0, *place, 10).parts:
                assert part.rewards == [2.0 * len(wire.decode_tokens(response.tokens)) for response in part.responses]


@pytest.mark.each_change
def test_a_corrected_reward_file_scores_recorded_groups_again(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reused = []
    for value in (1.0, 1.0, -5.0):
        reward.write_text(f"def constant(prompts, **columns):\n    return [{value}] * len(prompts)\n")
        with submitted(tmp_path / "run", "--reward", f"{reward}:constant") as (process, client):
            parts = [part for place in PLACES for part in client.slot(0, *place, 10).parts]
            assert [part.rewards for part in parts] == [[value, value]] * 8
            reused.append(client.status()["counters"]["reused"])
            process.kill()
    assert reused == [0, 8, 0]


@pytest.mark.each_change
def test_a_script_makes_groups_come_back_out_of_order_from_all_engines_and_the_same_in_every_run(
    tmp_path: Path,
) -> None:
    reward, script = tmp_path / "reward.py", tmp_path / "script.json"
    reward.write_text("def one(prompts, completions, **columns):\n    return [1.0] * len(completions)\n")
    script.write_text('{"vocab_size": 50, "lengths": [3, 8], "delay": [0, 2], "delay_seed": 2489}')
    words = ("--rollout-num-engines", "2", "--reward", f"{reward}:one", "--rollout-script", str(script))
    plan = wire.Plan(num_prompts=8, group_size=2, num_replicas=1, micro_batch_size=2)
    orders: list[list[int]] = []
    # With this seed no two of the eight delays are less than 0.2 seconds apart.
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        with submitted(tmp_path / str(number) / "run", *words, plan=plan) as (_, client):
            parts = [part for index in range(8) for part in client.slot(0, 0, index, 10).parts]
            client.complete(0)
            responses = [response for part in parts for response in part.responses]
            assert {response.engine for response in responses} == {"engine-0", "engine-1"}
            assert {response.finish_reason for response in responses} == {"stop", "length"}
            for response in responses:
                tokens = wire.decode_tokens(response.tokens)
                assert 3 <= len(tokens) <= 8
                assert (len(tokens) == 8) == (response.finish_reason == "length")
                assert tokens.max() < 50
            assert [part.rewards for part in parts] == [[1.0, 1.0]] * 8
            orders.append([part.prompt_index for part in parts])
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == list(range(8)) != orders[0]


REACHES = """
import os, resource, sys

def reaches(prompts, completions, **columns):
    print("scoring", len(completions), file=sys.stderr)
    assert os.environ["JUDGE_KEY"] == "secret"
    assert "NOT_ASKED_FOR" not in os.environ
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == 2 << 30
    with open(os.path.join(FOLDER, "table.txt")) as file:
        return [float(file.read())] * len(completions)
"""


@pytest.mark.each_change
def test_rewards_reach_what_flags_name_and_print_into_the_runs_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    monkeypatch.setenv("NOT_ASKED_FOR", "secret")
    tables, rewards = tmp_path / "tables", tmp_path / "rewards"
    for folder in (tables, rewards):
        folder.mkdir()
    (tables / "table.txt").write_text("2.5")
    (rewards / "mine.py").write_text(f"FOLDER = {str(tables)!r}\n{REACHES}")
    named = ("--reward-readable", str(tables), "--reward-environment", "JUDGE_KEY", "--reward-memory-gib", "2")
    with submitted(tmp_path / "run", "--reward", f"{rewards / 'mine.py'}:reaches", *named) as (process, client):
        assert client.slot(0, 0, 0, 10).parts[0].rewards == [2.5, 2.5]
        assert process.end() == 0
    assert "scoring 2" in (tmp_path / "run" / "rewards.log").read_text()


@pytest.mark.each_change
@pytest.mark.parametrize(
    ("name", "code", "words", "said"),
    [
        ("reaches", REACHES, (), "JUDGE_KEY"),
        (
            "slow",
            "import time\ndef slow(prompts, **columns):\n    time.sleep(30)\n",
            ("--reward-timeout", "0.5"),
            "did not end within 0.5 seconds",
        ),
    ],
    ids=["without flags it reaches no files or variables", "it takes longer than the flag says"],
)
def test_a_reward_that_fails_ends_the_iteration_by_name(
    tmp_path: Path, monkeypatch, name: str, code: str, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    (tmp_path / "mine.py").write_text(f"FOLDER = {str(tmp_path)!r}\n{code}")
    with submitted(tmp_path / "run", "--reward", f"{tmp_path / 'mine.py'}:{name}", *words) as (_, client):
        with pytest.raises(IterationLost) as caught:
            client.slot(0, 0, 0, 10)
        assert f"reward {name} failed for prompt" in str(caught.value)
        assert said in str(caught.value)
