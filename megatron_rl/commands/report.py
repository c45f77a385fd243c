"""`megatron-rl report`: one page about runs, which a browser opens without a network.

    megatron-rl report RUN... --out FILE.html     write the page
    megatron-rl report RUN... --serve [PORT]      serve it on this machine, and follow the runs until Ctrl-C

RUN is a folder with metrics.jsonl, such a file, or the folder that --save was given. LABEL=RUN gives it another name
than the folder's.
"""

import argparse
import contextlib
import math
from pathlib import Path

from megatron_rl.errors import ExitCode, UsageError
from megatron_rl.observe import metrics
from megatron_rl.observe.report.data import ReportData
from megatron_rl.observe.report.page import build_page, load_library, write_page
from megatron_rl.observe.report.server import ReportServer
from megatron_rl.observe.run_folder import label_runs

_LARGEST_PORT = 65535


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="megatron-rl report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run, or LABEL=RUN")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page to write")
    parser.add_argument(
        "--serve",
        type=int,
        nargs="?",
        const=0,
        metavar="PORT",
        help="serve it on this port, or on a free one",
    )
    parser.add_argument(
        "--peak-tflops", type=float, metavar="X", help="what a device can compute, for the model FLOPs utilisation"
    )
    arguments = parser.parse_args(argv)
    _check(arguments)
    data = ReportData(label_runs(arguments.runs, metrics.FILE_NAME), arguments.peak_tflops)
    library = load_library()
    if arguments.out is not None:
        rollouts = [data.read_rollouts(run) for run in range(len(data))]
        write_page(arguments.out, build_page(library, data.read(), rollouts))
        print(f"written to {arguments.out}")
    if arguments.serve is not None:
        with contextlib.suppress(KeyboardInterrupt), ReportServer(data, build_page(library), arguments.serve) as server:
            print(f"open {server.address}\nCtrl-C ends it", flush=True)
            server.serve()
    return ExitCode.OK


def _check(arguments: argparse.Namespace) -> None:
    if arguments.out is None and arguments.serve is None:
        raise UsageError("--out is missing: write --out FILE.html, or --serve to follow a live run")
    if arguments.out is not None and arguments.out.suffix not in (".html", ".htm"):
        raise UsageError(f"--out {arguments.out}: a report ends with .html")
    if arguments.serve is not None and not 0 <= arguments.serve <= _LARGEST_PORT:
        raise UsageError(f"--serve {arguments.serve} must be a port from 0 to {_LARGEST_PORT}")
    peak = arguments.peak_tflops
    if peak is not None and not 0 < peak < math.inf:
        raise UsageError(f"--peak-tflops {peak:g} must be finite and above 0: 989 for bfloat16 on an H100")
