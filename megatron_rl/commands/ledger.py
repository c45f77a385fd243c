"""`megatron-rl ledger`: the seconds of every rank and engine of a run, by cause.

    megatron-rl ledger RUN            a table: shares of each one's time
    megatron-rl ledger RUN --json     seconds, and what they are made of

RUN is a run's folder, or the folder that --save was given. docs/metrics.md says what the causes mean.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_rl.errors import ExitCode
from megatron_rl.observe import metrics
from megatron_rl.observe.ledger import ENGINE_CAUSES, RANK_CAUSES, Account, compute_ledger
from megatron_rl.observe.run_folder import find_run
from megatron_rl.observe.trace import read


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="megatron-rl ledger", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--last", type=int, metavar="COUNT", help="only so many of the newest iterations")
    arguments = parser.parse_args(argv)
    trace = read(find_run(arguments.run, metrics.FILE_NAME))
    if arguments.last is not None:
        trace = trace.of(trace.versions[-max(1, arguments.last) :])
    accounts = compute_ledger(trace)
    if arguments.json:
        print(json.dumps({account.name: _record(account) for account in accounts}))
    else:
        print("\n".join(describe(accounts)))
    return ExitCode.OK


def describe(accounts: Sequence[Account]) -> Iterator[str]:
    """Two tables: of ranks and of engines, with shares of the wall time."""
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


def _record(account: Account) -> dict[str, object]:
    return {"wall": account.wall, "seconds": account.seconds, "details": account.details}
