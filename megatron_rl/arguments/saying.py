"""One rank reports what is wrong with a command line, though every rank finds it.

Under torchrun the ranks tell each other what they found, through the launcher's own store, which is there before they
meet. The first rank that found something waits for what the others have, says all of it, and then every one of them
ends; torchrun ends the rest. What only another rank can see, as a folder that its host does not have, is said with that
rank's number. Ranks that something else starts say what they find each for itself: nothing is lost.
"""

import contextlib
import datetime
import json
import os
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from megatron_rl.errors import MegatronRLError

# How long a rank that found something waits for others, which may be starting still.
_PATIENCE = datetime.timedelta(seconds=60)
_SAID = "said"


@contextlib.contextmanager
def said_once(say: Callable[[str], None]) -> Iterator[None]:
    """Report what goes wrong inside, each problem once, and exit with the error's code.

    Without the launcher's store the error is the caller's to say.
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
    """What all ranks found, if this rank is to report it; else None, once another has reported."""
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
    """torchrun's store; None where something else starts the ranks, or the store is out of reach."""
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
    # A store that is gone takes the run with it, and is not what is wrong here.
    with contextlib.suppress(RuntimeError):
        store.set(key, json.dumps(list(problems)))


def _get(store: dist.Store, key: str) -> list[str] | None:
    """None if nothing came in time."""
    try:
        return list(json.loads(store.get(key)))
    except RuntimeError:
        return None
