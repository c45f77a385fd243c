"""The transport with which every rank of the trainer sends its own parts, and a sender's place in a group."""

import dataclasses

TRANSPORT = "nccl_m2n"


@dataclasses.dataclass(frozen=True)
class StageGroup:
    """A sender's place in the group of its stage."""

    host: str
    port: int
    rank: int
    num_engines: int
    num_workers: int
    """The workers of each engine."""
