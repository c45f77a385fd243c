"""A sidecar whose only engine is a vLLM on another host, as processes: it samples what is published."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from megatron_rl.cli import main as megatron_rl
from megatron_rl.sidecar.hosts.remote import PATIENCE
from tests.hosts.namespaces import network
from tests.hosts.worlds import Agent, until_gone
from tests.sidecar import vllm_models
from tests.sidecar.sidecar_process import SidecarProcess, sidecar
from tests.sidecar.vllm_models import in_shared_memory
from tests.submissions import make_submission

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PUBLISH_SECONDS = 300.0
# What a busy machine adds to a deadline.
BUSY_SECONDS = 15.0


class RealAgent(Agent):
    """An agent that starts vLLM."""

    def start(self) -> None:
        words = [sys.executable, "-m", "megatron_rl.sidecar.agent", "--listen", self.address]
        words += ["--token-file", str(self.folder / "token"), "--folder", str(self.folder)]
        with (self.folder / "output").open("ab") as output:
            self.process = self._popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)


def run_iteration(process: SidecarProcess, model: Path) -> None:
    with process.client(patience=60.0) as client:
        client.take_lease("run")
        with in_shared_memory(model, 1) as weights:
            published = client.publish(msgspec.structs.replace(weights, run="run"), PUBLISH_SECONDS)
        assert 0 < published.num_compared == published.num_parameters
        client.submit(make_submission(version=1, fingerprint=weights.fingerprint, deadline_seconds=PUBLISH_SECONDS))
        slots = [client.slot(1, replica, index, PUBLISH_SECONDS) for replica in range(2) for index in range(4)]
        assert sorted(part.prompt_index for slot in slots for part in slot.parts) == list(range(8))
        assert {slot.fingerprint for slot in slots} == {weights.fingerprint}
        client.complete(1)
        (state,) = client.status()["hosts"].values()
        assert (state["state"], state["engines"]) == ("up", ["engine-0"])


def test_an_iteration_is_sampled_on_another_host_which_is_empty_after_the_sidecar_is_killed(tmp_path):
    model = vllm_models.draw_with_tokenizer(tmp_path / "model")
    with network(1) as (host,):
        agent = RealAgent(tmp_path / "host", f"{host.address}:7100", host.popen)
        agent.start()
        hosts = agent.folder / "hosts.toml"
        hosts.write_text(f'token_file = "token"\n[[host]]\naddress = "{agent.address}"\n')
        words = ["--rollout-hosts", f"static:{hosts}", "--rollout-num-engines", "0", "--platform", "cpu"]
        words += ["--hf-model", str(model), "--seq-length", "128", "--reward", "length:8=1"]
        try:
            agent.wait()
            with sidecar(tmp_path / "run", *words) as process:
                run_iteration(process, model)
                processes = agent.list_engine_processes()
                assert processes
                process.kill()
                begun = time.monotonic()
                asyncio.run(until_gone(processes))
                print(f"its engine had ended {time.monotonic() - begun:.1f} s after the sidecar was killed")
                assert time.monotonic() - begun < PATIENCE.lease + BUSY_SECONDS
            received, sent = host.count_bytes()
            print(f"the host received {received} bytes and sent {sent}")
        finally:
            agent.end()
    assert megatron_rl(["audit", str(tmp_path / "run")]) == 0
