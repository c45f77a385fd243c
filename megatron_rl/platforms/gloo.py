"""Groups of ranks on gloo that share one thread, and not a thread each, to receive with."""

import datetime
import functools
import logging
from typing import Any

from torch.distributed import distributed_c10d

_log = logging.getLogger(__name__)
_NEEDED = ("_Options", "create_default_device")
_MARK = "_shares_device"


def share_device() -> None:
    """Give all groups that this process makes one device of gloo; a second call does nothing.

    torch makes a device for each group, and a device's thread wakes up a hundred times a second to see whether it must
    end. Megatron makes some forty groups, so a rank that only waits takes 4 % of a core, which other ranks want.
    """
    group = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if group is None or not all(hasattr(group, name) for name in _NEEDED):
        _log.info("this torch has no gloo whose groups can share a device: each has a thread of its own")
        return
    if hasattr(group, _MARK):
        return
    original = group.__init__

    @functools.cache
    def find_device() -> Any:
        return group.create_default_device()

    @functools.wraps(original)
    def make(self: Any, store: Any, rank: int, size: int, *others: Any, **keywords: Any) -> None:
        timeout = keywords.get("timeout")
        if others or len(keywords) != 1 or not isinstance(timeout, datetime.timedelta):
            # Whoever gives options has chosen a device.
            original(self, store, rank, size, *others, **keywords)
            return
        options = group._Options()
        options._devices = [find_device()]
        options._timeout = timeout
        original(self, store, rank, size, options)

    group.__init__ = make
    setattr(group, _MARK, True)
