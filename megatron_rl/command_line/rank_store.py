"""The launcher's own store, through which ranks tell each other what they find before they have a process group."""

import datetime
import os

import torch.distributed as dist

# How long a rank waits for the others, which may still be starting.
_PATIENCE = datetime.timedelta(seconds=60)


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
    """Return the least of the numbers that ranks have."""
    least = own
    try:
        store.set(str(rank), str(own))
        for other in range(num_ranks):
            least = min(least, int(store.get(str(other))))
    except RuntimeError:
        return least
    return least
