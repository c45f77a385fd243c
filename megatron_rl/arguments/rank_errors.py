"""One rank reports what is wrong with a command line, though every rank finds it.

Under torchrun the ranks tell each other what they found through the launcher's own store, which exists before they
meet. The first rank that found something waits for the others' findings and reports all of them. Then every rank that
found something ends, and torchrun ends the rest. What only another rank can see, such as a folder that is missing on
its host, is reported with that rank's number. Without torchrun each rank reports what it finds: nothing is lost.
"""

import contextlib
import datetime
import json
import os
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from megatron_rl.errors import MegatronRLError

# How long a rank that found something waits for others, which may still be starting.
_PATIENCE = datetime.timedelta(seconds=60)
_SAID = "said"


@contextlib.contextmanager
def said_once(say: Callable[[str], None]) -> Iterator[None]:
    """Report what goes wrong inside, each problem once, and exit with the error's code.

    Without the launcher's store the error goes to the caller.
    """
    store, rank = _launchers_store(), int(os.environ.get("RANK", "0"))
    if store is None:
        yield
        return
    try:
        yield
    except MegatronRLError as error:
        problems = _to_say(store, rank, error.problems)
        if problems is not None:
            for problem in problems:
                say(problem)
            _set(store, _SAID, [])
        raise SystemExit(error.exit_code) from None
    _set(store, _key(rank), [])


def _to_say(store: dist.Store, rank: int, own: Sequence[str]) -> list[str] | None:
    """Return what all ranks found, if this rank is to report it; else None, after another rank has reported."""
    _set(store, _key(rank), own)
    if any(_get(store, _key(other)) for other in range(rank)):
        _get(store, _SAID)
        return None
    found: dict[str, int] = dict.fromkeys(own, rank)
    for other in range(rank + 1, int(os.environ["WORLD_SIZE"])):
        for problem in _get(store, _key(other)) or ():
            found.setdefault(problem, other)
    return [problem if first == 0 else f"on rank {first}: {problem}" for problem, first in found.items()]


def _launchers_store() -> dist.Store | None:
    """Return torchrun's store; None if torchrun did not start the ranks, or the store cannot be reached."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=_PATIENCE))
    except (RuntimeError, ValueError):
        return None
    return dist.PrefixStore("megatron_rl/command_line", store)


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
