"""Collections of garbage that leave out what a start made.

Python looks for garbage among all objects from time to time, and a process that has imported torch has hundreds of
thousands of them: for a fifth of a second it does nothing else. In a sidecar every request waits that long, and in a
rank every other rank.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def leaving_out_what_exists() -> Iterator[None]:
    """Collect now, and leave all objects that exist out of the collections within this context."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
