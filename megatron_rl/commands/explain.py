"""`megatron-rl explain`: what ledger and metrics of a run say is wrong, and the flags to try.

    megatron-rl explain RUN

Says nothing of a healthy run. Of one that is too short to judge it says how many iterations are wanted. RUN is a run's
folder, or the folder that --save was given.
"""

import argparse
from pathlib import Path

from megatron_rl.errors import ExitCode, InputError
from megatron_rl.observe import config_file, metrics
from megatron_rl.observe.enough import describe_lack_of_records, describe_lack_of_time
from megatron_rl.observe.explain import explain
from megatron_rl.observe.run_folder import find_run
from megatron_rl.observe.trace import Trace, read


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="megatron-rl explain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", type=Path)
    run = find_run(parser.parse_args(argv).run, metrics.FILE_NAME)
    trace, records = _read_trace(run), metrics.read(run)
    if trace is not None and (lack := describe_lack_of_time(trace)) is not None:
        print(f"note: {lack}")
        trace = None
    if (lack := describe_lack_of_records(records)) is not None:
        print(f"note: {lack}")
        records = []
    # A path to the file itself has its run's folder around it.
    folder = run if run.is_dir() else run.parent
    for finding in explain(trace, records, config_file.read(folder / config_file.FILE_NAME)):
        print(finding.sentence)
    return ExitCode.OK


def _read_trace(run: Path) -> Trace | None:
    """Read the trace; None, which is said, if there is none: metrics can be explained without."""
    try:
        found = read(run)
    except InputError as error:
        print(f"note: where the time went is not known: {error}")
        return None
    # The first iteration warms up.
    return found.of(found.versions[1:])
