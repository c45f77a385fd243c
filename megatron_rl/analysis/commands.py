"""The commands that read runs: `explain`, `ledger`, `picture`, `report` and `trace`, a function each."""

import argparse
import contextlib
import inspect
import json
import math
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from megatron_rl.analysis import perfetto, write_out
from megatron_rl.analysis.device_advice import advise
from megatron_rl.analysis.explain import describe_lack_of_records, describe_lack_of_time, list_findings
from megatron_rl.analysis.ledger import ENGINE_CAUSES, RANK_CAUSES, Account, compute_ledger
from megatron_rl.analysis.picture import picture as draw
from megatron_rl.analysis.report.data import ReportData
from megatron_rl.analysis.report.page import build_page, load_library
from megatron_rl.analysis.report.server import ReportServer
from megatron_rl.errors import ExitCode, InputError, UsageError
from megatron_rl.observe import metrics
from megatron_rl.observe import trace as trace_file
from megatron_rl.observe.run_folder import CONFIG_FILE, find_run, label_runs, read_saved_config
from megatron_rl.observe.summary import text_curves
from megatron_rl.observe.trace import Trace

_LARGEST_PORT = 65535


def explain(argv: list[str]) -> int:
    """`megatron-rl explain`: the bounds that a run's ledger and metrics break, and the flags to try.

        megatron-rl explain RUN
        megatron-rl explain RUN --devices     what another division of its devices would give

    Prints nothing about a healthy run. If a run is too short to judge, it prints the number of iterations that are
    needed. `--devices` predicts an iteration's seconds with more engines and fewer replicas of the trainer, or the
    reverse; it says how far off it is, and refuses a run from which it cannot tell. RUN is a run's folder, the folder
    above it, or the folder that --save was given.
    """
    parser = _make_parser("explain", explain.__doc__)
    parser.add_argument("run", metavar="RUN", type=Path)
    parser.add_argument("--devices", action="store_true", help="divide the run's devices otherwise")
    arguments = parser.parse_args(argv)
    run = find_run(arguments.run, metrics.FILE_NAME)
    # RUN may also be the path of the file of metrics, in its run's folder.
    folder = run if run.is_dir() else run.parent
    config = read_saved_config(folder / CONFIG_FILE)
    if arguments.devices:
        whole = trace_file.read_trace(folder)
        print("\n".join(advise(whole.select(whole.versions[1:]), config)))
        return ExitCode.OK
    trace, records = _read_trace_if_any(run), metrics.read_metrics(run)
    if trace is not None and (lack := describe_lack_of_time(trace)) is not None:
        print(f"note: {lack}")
        trace = None
    if (lack := describe_lack_of_records(records)) is not None:
        print(f"note: {lack}")
        records = []
    for finding in list_findings(trace, records, config):
        print(finding.sentence)
    return ExitCode.OK


def ledger(argv: list[str]) -> int:
    """`megatron-rl ledger`: the seconds of every rank and engine of a run, by cause.

        megatron-rl ledger RUN            a table: the share of each cause
        megatron-rl ledger RUN --json     seconds, and their parts

    RUN is a run's folder, the folder above it, or the folder that --save was given. docs/metrics.md says what the
    causes mean.
    """
    parser = _make_parser("ledger", ledger.__doc__)
    parser.add_argument("run", metavar="RUN", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    _add_last(parser)
    arguments = parser.parse_args(argv)
    accounts = compute_ledger(_read_last(arguments))
    if arguments.json:
        values = [(one.name, {"wall": one.wall, "seconds": one.seconds, "details": one.details}) for one in accounts]
        print(json.dumps(dict(values)))
    else:
        print("\n".join(_describe_ledger(accounts)))
    return ExitCode.OK


def picture(argv: list[str]) -> int:
    """`megatron-rl picture`: the curves of one or more runs, and their time by part.

        megatron-rl picture RUN...                     as text
        megatron-rl picture RUN... --out FILE          as a picture; FILE ends with .png, .svg or .pdf

    RUN is a folder with metrics.jsonl, such a file, the folder above, or the folder that --save was given. LABEL=RUN
    gives it another name than the folder's.
    """
    parser = _make_parser("picture", picture.__doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run, or LABEL=RUN")
    parser.add_argument("--out", type=Path, help="the picture to write; without it the curves are printed")
    arguments = parser.parse_args(argv)
    files = label_runs(arguments.runs, metrics.FILE_NAME)
    if arguments.out is None:
        print(text_curves({label: metrics.read_metrics(path) for label, path in files.items()}))
    else:
        draw(files, arguments.out)
        print(f"written to {arguments.out}")
    return ExitCode.OK


def report(argv: list[str]) -> int:
    """`megatron-rl report`: one page about runs, which a browser opens without a network.

        megatron-rl report RUN... --out FILE.html     write the page
        megatron-rl report RUN... --serve [PORT]      serve it on this machine, and follow the runs until Ctrl-C

    RUN is a folder with metrics.jsonl, such a file, the folder above, or the folder that --save was given. LABEL=RUN
    gives it another name than the folder's.
    """
    parser = _make_parser("report", report.__doc__)
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
        "--peak-tflops", type=float, metavar="X", help="a device's peak TFLOP/s, for the model FLOPs utilisation"
    )
    arguments = parser.parse_args(argv)
    _check_report(arguments)
    data = ReportData(label_runs(arguments.runs, metrics.FILE_NAME), arguments.peak_tflops)
    library = load_library()
    if arguments.out is not None:
        rollouts = [data.read_rollouts(run) for run in range(len(data))]
        page = build_page(library, data.read(), rollouts)
        write_out(arguments.out, lambda path: path.write_text(page, encoding="utf-8"))
        print(f"written to {arguments.out}")
    if arguments.serve is not None:
        with contextlib.suppress(KeyboardInterrupt), ReportServer(data, build_page(library), arguments.serve) as server:
            # A shell without job control starts what it has in the background so.
            is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            print(f"open {server.address}\n{f'kill {os.getpid()}' if is_ignored else 'Ctrl-C'} ends it", flush=True)
            server.serve()
    return ExitCode.OK


def trace(argv: list[str]) -> int:
    """`megatron-rl trace`: the times at which every process of a run did its work, as a file for ui.perfetto.dev.

        megatron-rl trace RUN --out trace.json

    RUN is a run's folder, the folder above it, or the folder that --save was given.
    """
    parser = _make_parser("trace", trace.__doc__)
    parser.add_argument("run", metavar="RUN", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    _add_last(parser)
    arguments = parser.parse_args(argv)
    events = msgspec.json.encode(perfetto.convert(_read_last(arguments)))
    write_out(arguments.out, lambda path: path.write_bytes(events))
    print(f"written to {arguments.out}: open it in https://ui.perfetto.dev")
    return ExitCode.OK


def _make_parser(command: str, description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"megatron-rl {command}",
        description=inspect.cleandoc(description or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_last(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--last", type=int, metavar="COUNT", help="only the COUNT newest iterations")


def _read_last(arguments: argparse.Namespace) -> Trace:
    """Read the trace of the run, or of its newest iterations if --last is given."""
    found = trace_file.read_trace(find_run(arguments.run, metrics.FILE_NAME))
    return found if arguments.last is None else found.select(found.versions[-max(1, arguments.last) :])


def _read_trace_if_any(run: Path) -> Trace | None:
    """Read the trace without its first iteration, which warms up. If the run has none, say so and return None."""
    try:
        found = trace_file.read_trace(run)
    except InputError as error:
        # Metrics can be explained without a trace.
        print(f"note: where the time went is not known: {error}")
        return None
    return found.select(found.versions[1:])


def _describe_ledger(accounts: Sequence[Account]) -> Iterator[str]:
    """Yield the lines of two tables, of ranks and of engines, with shares of the wall time."""
    for is_rank, title, causes in ((True, "rank", RANK_CAUSES), (False, "engine", ENGINE_CAUSES)):
        of_kind = [account for account in accounts if account.is_rank is is_rank]
        if not of_kind:
            continue
        if not is_rank:
            yield ""
        yield f"{title:<12}{'seconds':>10}" + "".join(f"{cause:>12}" for cause in causes)
        for account in of_kind:
            shares = "".join(f"{account.share(cause):>12.1%}" for cause in causes)
            yield f"{account.name:<12}{account.wall:>10.2f}{shares}"


def _check_report(arguments: argparse.Namespace) -> None:
    if arguments.out is None and arguments.serve is None:
        raise UsageError("--out is missing: write --out FILE.html, or --serve to follow a live run")
    if arguments.out is not None and arguments.out.suffix not in (".html", ".htm"):
        raise UsageError(f"--out {arguments.out}: a report ends with .html")
    if arguments.serve is not None and not 0 <= arguments.serve <= _LARGEST_PORT:
        raise UsageError(f"--serve {arguments.serve} must be a port from 0 to {_LARGEST_PORT}")
    peak = arguments.peak_tflops
    if peak is not None and not 0 < peak < math.inf:
        raise UsageError(f"--peak-tflops {peak:g} must be finite and above 0: 989 for bfloat16 on an H100")
