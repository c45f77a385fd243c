"""The exchange between ranks before they have a process group, through the launcher's own store.

They find the smallest of their devices. And one rank reports what is wrong with a command line, though every rank
finds it: the first rank that found a problem waits for the others' findings and reports all of them. Then every rank
that found one ends, and torchrun ends the rest. A problem that only another rank can see, such as a folder that is
missing on its host, is reported with that rank's number. Without torchrun each rank reports its own findings.
"""

import contextlib
import datetime
import json
import os
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from megatron_rl.errors import MegatronRLError

# How long a rank waits for the others, which may still be starting.
_PATIENCE = datetime.timedelta(seconds=60)
_REPORTED = "reported"


def find_store(prefix: str) -> dist.Store | None:
    """Return torchrun's store; None if torchrun did not start the ranks, or the store cannot be reached."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=_PATIENCE))
    except (RuntimeError, ValueError):
        return None
    return dist.PrefixStore(f"megatron_rl/{prefix}", store)


def find_smallest_device(own: int | None) -> int | None:
    """Return the bytes of the smallest device of all hosts, of which `own` is the smallest here.

    A host that does not answer in time does not count; ranks check later that they agree.
    """
    num_ranks, num_local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if own is None or num_ranks <= num_local:
        return own
    store = find_store("devices")
    return own if store is None else find_least(own, store, int(os.environ["RANK"]), num_ranks)


def find_least(own: int, store: dist.Store, rank: int, num_ranks: int) -> int:
    least = own
    try:
        store.set(str(rank), str(own))
        for other in range(num_ranks):
            least = min(least, int(store.get(str(other))))
    except RuntimeError:
        return least
    return least


@contextlib.contextmanager
def report_once(say: Callable[[str], None]) -> Iterator[None]:
    """Report each problem that is raised inside once, and exit with the error's code.

    Without the launcher's store the error is raised to the caller.
    """
    store, rank = find_store("command_line"), int(os.environ.get("RANK", "0"))
    if store is None:
        yield
        return
    try:
        yield
    except MegatronRLError as error:
        problems = _gather_problems(store, rank, error.problems)
        if problems is not None:
            for problem in problems:
                say(problem)
            _set(store, _REPORTED, [])
        raise SystemExit(error.exit_code) from None
    _set(store, _key(rank), [])


def _gather_problems(store: dist.Store, rank: int, own: Sequence[str]) -> list[str] | None:
    """Return all ranks' problems if this rank must report them; else return None after another rank has reported."""
    _set(store, _key(rank), own)
    if any(_get(store, _key(other)) for other in range(rank)):
        _get(store, _REPORTED)
        return None
    found: dict[str, int] = dict.fromkeys(own, rank)
    for other in range(rank + 1, int(os.environ["WORLD_SIZE"])):
        for problem in _get(store, _key(other)) or ():
            found.setdefault(problem, other)
    return [problem if first == 0 else f"on rank {first}: {problem}" for problem, first in found.items()]


def _key(rank: int) -> str:
    return f"rank {rank}"


def _set(store: dist.Store, key: str, problems: Sequence[str]) -> None:
    # If the store is gone the run ends anyway, and it is not the problem to report here.
    with contextlib.suppress(RuntimeError):
        store.set(key, json.dumps(list(problems)))


def _get(store: dist.Store, key: str) -> list[str] | None:
    """Read another rank's findings; None if none came in time."""
    try:
        return list(json.loads(store.get(key)))
    except RuntimeError:
        return None
