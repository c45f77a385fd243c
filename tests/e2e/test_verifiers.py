"""A whole run in which an environment server acts, over scripted engines."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.shared.records.audit_check import verify
from megatron_rl.sidecar.temporary import make_socket_folder
from tests.e2e import loop
from tests.e2e.test_agents import CHANGES
from tests.e2e.test_environments import read_responses


@pytest.mark.each_change
def test_rollouts_of_an_environment_server_are_trained_on(tmp_path: Path) -> None:
    world, address = loop.make_world(tmp_path), f"ipc://{make_socket_folder() / 's'}"
    server = subprocess.Popen([sys.executable, Path(__file__).with_name("verifiers_server.py"), address])
    try:
        loop.run(tmp_path / "run", 1, world.words("run", **CHANGES, rollout_verifiers=address, train_iters=2))
    finally:
        server.kill()
        server.wait()
    run = world.folder / "runs" / "run"
    assert not verify(run).breaches
    responses = read_responses(run)
    assert {response["finish_reason"] for response in responses} <= {"stop", "length"}
    assert all(len(response["spans"]) >= 3 for response in responses)
    assert all(0 < line["reward"]["sum"] < 3 for line in read_metrics(run))
