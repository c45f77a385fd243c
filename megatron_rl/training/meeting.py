"""Where the ranks of a run meet: torch's store, kept by rank 0, or by torchrun's agent."""

import datetime
import os

import torch.distributed as dist

from megatron_rl.training.lifelines import listen
from megatron_rl.training.watch import Watch, meets_in_an_agent


def meet(watch: Watch, timeout: datetime.timedelta) -> dist.Store:
    """The store, once this rank is connected to it; from then on at the latest the ranks watch each other."""
    if watch.is_connected:
        return _store_of_rank_0(watch, timeout)
    store, _, world_size = next(dist.rendezvous("env://", timeout=timeout))
    if world_size > 1 and meets_in_an_agent():
        watch.connect_through(store)
    return store


def _store_of_rank_0(watch: Watch, timeout: datetime.timedelta) -> dist.Store:
    """At a port that rank 0 tells the others: the one that all of them know is where they watch each other."""
    host = os.environ["MASTER_ADDR"]
    if watch.rank == 0:
        listener = listen(host, 0)
        port = listener.getsockname()[1]
        watch.say_store(port)
        return dist.TCPStore(
            host, port, watch.world_size, is_master=True, timeout=timeout, master_listen_fd=listener.detach()
        )
    port = watch.store_port(timeout.total_seconds())
    if port is None:
        raise TimeoutError("rank 0 did not say where its store is")
    return dist.TCPStore(host, port, watch.world_size, is_master=False, timeout=timeout)
