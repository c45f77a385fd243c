"""The hosts to which a trainer's ranks deliver weights, as the rollout service names them."""

import msgspec


class DeliveryHost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A host that takes weights over a port of its own."""

    name: str
    """The name of the host in errors and logs."""
    address: str
    port: int


class DeliveryHosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All hosts that take weights now."""

    epoch: int
    """A number that grows whenever a host joins or is lost."""
    token: str
    """The secret that the hosts of this service and the trainer's ranks share."""
    hosts: list[DeliveryHost]
    num_own_engines: int = 0
    """The number of engines on the service's own host, which load the folder of the trainer's rank 0."""


class LeftOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trainer's news that a version was not delivered to a host."""

    version: int
    reason: str
