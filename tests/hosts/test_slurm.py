"""A het-job on a Slurm cluster of this machine: vLLM under an agent in one component, ranks in the other."""

import time
from pathlib import Path

import pytest

from megatron_rl.cli import main as megatron_rl
from tests.e2e import loop
from tests.hosts.slurm import Cluster, cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ITERATIONS = 2
SECONDS = 900.0
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


def test_a_het_job_trains_on_groups_of_its_second_component_and_leaves_nothing(tmp_path, capfd):
    world = loop.make_world(tmp_path, head_dim=32)
    before = set(Path("/dev/shm").glob("megatron_rl-*"))
    words = world.words(
        "run", train_iters=ITERATIONS, tensor_model_parallel_size=2, rollout_engine="vllm", rollout_max_num_seqs=8
    )
    settings = tmp_path / "settings.sh"
    settings.write_text("export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo\n")
    with cluster(tmp_path / "slurm", ["node1", "node2"]) as made:
        launched = ["launch", "slurm", "--dry-run", "--engine-hosts", "1", "--devices-per-host", "0"]
        launched += ["--ranks-per-host", "2", "--source", str(settings), "--", str(loop.SCRIPT), *words]
        assert megatron_rl(launched) == 0
        folder = tmp_path / "runs" / "run" / "launch"
        script = str(folder / "job.sh")
        assert (folder / "job.sh").read_text() in capfd.readouterr().out
        made.call("sbatch", "--test-only", script)
        job = made.call("sbatch", "--parsable", script).strip()
        try:
            states = wait(made, job)
            outputs = "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))
            print(outputs)
            assert states == {"COMPLETED"}, made.read_logs()
        finally:
            made.call("scancel", job, check=False)
        # The agent has ended by itself, after its engine.
        assert "this host's agent serves at http://10.77.1.2:7100" in outputs
        assert "Killed" not in outputs
    assert set(Path("/dev/shm").glob("megatron_rl-*")) == before
    assert megatron_rl(["audit", str(tmp_path / "runs" / "run")]) == 0
    assert f"{ITERATIONS} of {ITERATIONS} iterations complete, 0 breaches" in capfd.readouterr().out


def wait(made: Cluster, job: str) -> set[str]:
    """Wait for the end of all components, and return their states."""
    deadline = time.monotonic() + SECONDS
    while True:
        states = made.find_states(job)
        if (states and states <= ENDED) or time.monotonic() > deadline:
            return states
        time.sleep(1)
