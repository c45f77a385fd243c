"""Measure one part: `python -m benchmarks.gpu.run_part NAME --rows FILE --folder FOLDER --seconds SECONDS [--tiny]`."""

import argparse
import importlib
import signal
import sys
import time
from pathlib import Path

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.work import Work

# Seconds to wait for the memory of the part before.
FREE_SECONDS = 20.0
FREE_SHARE = 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("--rows", type=Path, required=True, help="the file that rows are appended to")
    parser.add_argument("--folder", type=Path, required=True, help="the folder of the models, which parts share")
    parser.add_argument("--seconds", type=float, required=True, help="seconds from now that it may measure")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, on the CPU")
    parsed = parser.parse_args()
    end = time.monotonic() + parsed.seconds
    # Whatever it has started is ended with it, in order.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    if not parsed.tiny:
        _await_memory()
    parsed.folder.mkdir(parents=True, exist_ok=True)
    part = PARTS[parsed.name]
    work = Work(parsed.rows, parsed.folder, part.model, parsed.tiny, end)
    importlib.import_module(f"benchmarks.gpu.{part.module}").measure(work)


def _await_memory() -> None:
    """Wait until the processes of the part before have left the GPU."""
    import torch

    deadline = time.monotonic() + FREE_SECONDS
    while True:
        free, total = torch.cuda.mem_get_info()
        if free >= FREE_SHARE * total:
            return
        if time.monotonic() > deadline:
            print(f"other processes hold {(total - free) / 2**30:.1f} GiB of the GPU; it is measured beside them")
            return
        time.sleep(0.5)


if __name__ == "__main__":
    main()
