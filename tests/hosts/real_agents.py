"""Agents with vLLM, on hosts that share the test's files or have files of their own."""

from pathlib import Path

from tests.hosts.namespaces import INSIDE, Host
from tests.hosts.worlds import Agent

PORT = 7100
_MODULE = "megatron_rl.sidecar.agent"
# What a time of day that is wrong by ten minutes looks like to a program.
_AHEAD = (
    "import runpy, time; now = time.time; time.time = lambda: now() + 600; "
    f"runpy.run_module({_MODULE!r}, run_name='__main__')"
)


class RealAgent(Agent):
    """An agent that starts vLLM, and receives weights."""

    program = ("-m", _MODULE)

    def __init__(self, host: Host, folder: Path | None = None) -> None:
        """Make an agent, whose folder is in the host's own one if none is given."""
        own = None if folder is not None else INSIDE / "agent"
        super().__init__(folder or host.folder / "agent", f"{host.address}:{PORT}", host.popen, own)

    def turn_clock(self) -> None:
        """Have its clock ten minutes ahead when it starts again."""
        self.program = ("-c", _AHEAD)
