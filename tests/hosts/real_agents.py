"""Agents with vLLM on hosts that have files of their own, and the file that names them."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.hosts.namespaces import INSIDE, Host
from tests.hosts.worlds import TOKEN, Agent

PORT = 7100
_MODULE = "megatron_rl.sidecar.agent"
# What a time of day that is wrong by ten minutes looks like to a program.
_AHEAD = (
    "import runpy, time; now = time.time; time.time = lambda: now() + 600; "
    f"runpy.run_module({_MODULE!r}, run_name='__main__')"
)


class HostAgent(Agent):
    """An agent with vLLM on a host that has files of its own."""

    def __init__(self, host: Host) -> None:
        assert host.folder is not None
        super().__init__(host.folder / "agent", f"{host.address}:{PORT}", host.popen)
        self.is_ahead = False
        """True if its clock is ten minutes ahead."""

    def start(self) -> None:
        inside = INSIDE / "agent"
        program = ["-c", _AHEAD] if self.is_ahead else ["-m", _MODULE]
        words = [sys.executable, *program, "--listen", self.address]
        words += ["--token-file", str(inside / "token"), "--folder", str(inside)]
        with (self.folder / "output").open("ab") as output:
            self.process = self._popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)


def write_hosts(host: Host, agents: Sequence[Agent]) -> Path:
    """Write the file of hosts into a host's folder; return it as that host sees it."""
    assert host.folder is not None
    token = host.folder / "token-of-agents"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    named = [f'[[host]]\naddress = "{agent.address}"\n' for agent in agents]
    (host.folder / "hosts.toml").write_text("\n".join([f'token_file = "{token.name}"', *named]))
    return INSIDE / "hosts.toml"
