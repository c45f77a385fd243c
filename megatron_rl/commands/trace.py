"""`megatron-rl trace`: what every process of a run did when, as a file for ui.perfetto.dev.

    megatron-rl trace RUN --out trace.json

RUN is a run's folder, or the folder that --save was given.
"""

import argparse
from pathlib import Path

import msgspec

from megatron_rl.errors import ExitCode, InputError
from megatron_rl.observe import metrics, perfetto
from megatron_rl.observe.run_folder import find_run
from megatron_rl.observe.trace import read


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="megatron-rl trace", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--last", type=int, metavar="COUNT", help="only so many of the newest iterations")
    arguments = parser.parse_args(argv)
    trace = read(find_run(arguments.run, metrics.FILE_NAME))
    if arguments.last is not None:
        trace = trace.of(trace.versions[-max(1, arguments.last) :])
    unfinished = arguments.out.with_name(f".{arguments.out.name}")
    try:
        unfinished.write_bytes(msgspec.json.encode(perfetto.convert(trace)))
        unfinished.replace(arguments.out)
    except OSError as error:
        raise InputError(f"--out {arguments.out} cannot be written: {error.strerror}") from None
    print(f"written to {arguments.out}: open it in https://ui.perfetto.dev")
    return ExitCode.OK
