"""Run a test in a process whose device is the emulated one."""

import functools
from collections.abc import Callable

from tests.ranks import run_ranks


def rehearsed(function: Callable[[], None]) -> Callable[[], None]:
    """Run a test's body on one rank of the rehearsal."""

    @functools.wraps(function)
    def test() -> None:
        run_ranks(function, 1, platform="rehearsed")

    # A rank finds its function by name, in the module where it finds the test.
    function.__qualname__ += ".__wrapped__"
    return test
