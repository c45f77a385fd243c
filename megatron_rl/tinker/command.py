"""`megatron-rl serve --tinker`: the ranks and engines of a run, for clients of Tinker's interface.

    megatron-rl serve --tinker [--nproc-per-node N] FLAGS

FLAGS are those of `torchrun -m megatron_rl`: model, layout, engines. Once it serves, it prints the address and the file
of the key. SIGTERM and Ctrl-C end it.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron_rl.errors import UsageError


def main(argv: Sequence[str]) -> NoReturn:
    parser = argparse.ArgumentParser(
        "megatron-rl serve", None, __doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--tinker", action="store_true", help="serve Tinker's interface")
    parser.add_argument("--nproc-per-node", type=int, default=1, help="the ranks on this host; 1 if not given")
    arguments, flags = parser.parse_known_args(argv)
    if "--stage" in flags:
        raise UsageError("--stage is set by this command: drop it")
    count, launcher = arguments.nproc_per_node, list[str]()
    if count > 1:
        launcher = ["torch.distributed.run", "--nproc-per-node", str(count), "-m"]
    words = ["-m", *launcher, "megatron_rl.tinker", "--stage", "serve", *flags]
    os.execv(sys.executable, [sys.executable, *words])
