"""One rank reports what is wrong with a command line, though every rank finds it.

Under torchrun the ranks exchange their findings through the launcher's own store, which exists before they have a
process group. The first rank that found a problem waits for the others' findings and reports all of them. Then every
rank that found one ends, and torchrun ends the rest. A problem that only another rank can see, such as a folder that is
missing on its host, is reported with that rank's number. Without torchrun each rank reports its own findings, and none
is lost.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from megatron_rl.command_line.rank_store import find_store
from megatron_rl.errors import MegatronRLError

_REPORTED = "reported"


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
