"""What the command line said."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Given:
    """A value and the flag it came from, as it was written."""

    value: Any
    source: str
