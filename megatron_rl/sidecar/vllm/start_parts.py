"""The seconds of the parts of a vLLM server's start, from the kernel's account of its processes and from its log.

They are for people only: a phrase that another vLLM words differently is left out, and nothing depends on it.
"""

import os
import re
from collections.abc import Mapping, Sequence

from megatron_rl.sidecar.processes import read_process

SERVER = "imports of the server"
CORE = "imports of the core"
MODEL = "model"
COMPILATION = "compilation"
GRAPHS = "graphs"
WARM_UP = "memory and warm-up"
TRIAL = "trial of an update"

_PHRASES = {
    MODEL: re.compile(r"Model loading took .* and ([\d.]+) seconds"),
    COMPILATION: re.compile(r"torch\.compile took ([\d.]+) s in total"),
    GRAPHS: re.compile(r"Graph capturing finished in ([\d.]+) secs"),
    # This one holds the two above.
    WARM_UP: re.compile(r"init engine \(.*\) took ([\d.]+) s"),
}


def measure_server(worker: int) -> float:
    """Return the seconds between the starts of a server and of its core; `worker` is a process of the core, or it.

    An engine's processes are a session, which the server leads. Return 0 if one of them has ended.
    """
    try:
        leader = os.getsid(worker)
    except ProcessLookupError:
        return 0.0
    core = found = read_process(worker)
    while found is not None and found.parent != leader and found.parent > 1:
        core = found = read_process(found.parent)
    server = read_process(leader)
    if core is None or server is None:
        return 0.0
    return (core.started - server.started) / os.sysconf("SC_CLK_TCK")


def describe_start(until_answer: float, server: float, trial: float, log: Sequence[str]) -> Mapping[str, float]:
    """Divide the seconds until a server answers into parts, which follow one another; `trial` came after them."""
    found = {
        part: max(float(match[1]) for match in matches)
        for part, phrase in _PHRASES.items()
        if (matches := [match for line in log if (match := phrase.search(line))])
    }
    if WARM_UP in found:
        found[WARM_UP] = max(0.0, found[WARM_UP] - found.get(COMPILATION, 0.0) - found.get(GRAPHS, 0.0))
    core = until_answer - server - sum(found.values())
    return {SERVER: server, CORE: max(0.0, core), **found, TRIAL: trial}
