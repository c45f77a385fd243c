"""The parser of flags that the trainer and the sidecar share."""

import argparse
from typing import Any, NoReturn

from megatron_rl.errors import UsageError


class FlagParser(argparse.ArgumentParser):
    """A parser that raises a UsageError in place of ending the process.

    Flags cannot be abbreviated, and a flag that was not given leaves no attribute.
    """

    def __init__(self, prog: str, description: str, **keywords: Any) -> None:
        super().__init__(
            prog=prog, description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS, **keywords
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))
