"""The way from a worker to the trainer's sender of a stream, tried before the worker joins the sender's group.

A worker that cannot connect would leave all others waiting in the group until the deadline, without a name.
"""

import socket
import time

from megatron_rl.sidecar.vllm.received import Refusal

_PATIENCE_SECONDS = 20.0
_PAUSE_SECONDS = 0.1


def must_be_reached(host: str, port: int, seconds: float = _PATIENCE_SECONDS) -> None:
    """Raise a Refusal unless this host connects to the sender, which may be about to listen, within `seconds`.

    The sender's store takes no notice of a connection that says nothing.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection((host, port), max(_PAUSE_SECONDS, deadline - time.monotonic())):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise Refusal(
                    f"host {socket.gethostname()} does not reach rank 0 of the trainer at {host}:{port} within "
                    f"{seconds:g} s ({error}): open all ports between the hosts of ranks and of engines, or write "
                    "--rollout-transport shm"
                ) from None
        time.sleep(_PAUSE_SECONDS)
