"""The hosts that forward a version to other hosts.

Invariants: each host gets the version from one other; up to `_MOST_DIRECT` hosts get it from the trainer, and of more
than these, two do; no host forwards it to more than one. So beyond that number the trainer's link carries the weights
twice, and a host's link once in each direction. A host that forwarded to two would take twice as long as one that
receives, however many hosts the trainer has.
"""

from collections.abc import Sequence

_MOST_DIRECT = 8
_NUM_CHAINS = 2


def plan_tree(names: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the hosts that the trainer sends to, and those that each host forwards to."""
    if len(names) <= _MOST_DIRECT:
        return list(names), {name: [] for name in names}
    children = {name: list(names[place + _NUM_CHAINS : place + _NUM_CHAINS + 1]) for place, name in enumerate(names)}
    return list(names[:_NUM_CHAINS]), children


def list_below(name: str, children: dict[str, list[str]]) -> list[str]:
    """List all hosts that get a version by way of this one."""
    return [one for child in children[name] for one in (child, *list_below(child, children))]
