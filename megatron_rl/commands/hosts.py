"""`megatron-rl hosts RUN`: the hosts of a live run, their engines and ranks, and what these do now.

RUN is the run's folder, on the sidecar's host: it has the sidecar's address and its token. If rank 0 is on the same
host, ranks are listed too.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import ExitCode, InputError, UsageError
from megatron_rl.observe.rank_places import ReadPlaces, read_places
from megatron_rl.observe.run_folder import find_run, list_runs
from megatron_rl.shared.protocol.client import RolloutClient, read_token

_ADDRESS, _TOKEN = "address", "token"
_PATIENCE_SECONDS = 5.0
_OWN_HOST = "(own host)"
_UP = ("ready", "publishing")
_TITLES = ("host", "state", "silent", "engine", "state", "step", "in flight", "restarts")
_TITLES_OF_RANKS = ("host of ranks", "ranks", "part of the iteration")


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return ExitCode.OK if argv else ExitCode.USAGE
    if len(argv) > 1:
        raise UsageError(f"{argv[1]} is one folder too many: name one run")
    path = Path(argv[0])
    if not any((run / _ADDRESS).exists() for run in list_runs(path, _ADDRESS)):
        raise InputError(
            f"no sidecar serves {path}, which has no file {_ADDRESS}: name the folder of a live run, on "
            "the host of its sidecar"
        )
    folder = find_run(path, _ADDRESS)
    for line in describe(_ask(folder)):
        print(line)
    for line in describe_ranks(read_places(folder)):
        print(line)
    return ExitCode.OK


def describe(status: Mapping[str, Any]) -> Iterator[str]:
    engines, hosts = status["engines"]["engines"], status["hosts"]
    run, version = status["run"], status["version"]
    yield (
        f"run {run}, " + ("nothing is published" if version is None else f"version {version}") if run else "no run yet"
    )
    places = {engine: name for name, host in hosts.items() for engine in host["engines"]}
    rows: list[tuple[str, ...]] = [_TITLES]
    for name in [_OWN_HOST, *hosts]:
        host = hosts.get(name)
        own = [engine for engine in engines if places.get(engine, _OWN_HOST) == name]
        if host is None and not own:
            continue
        state = ("up", "") if host is None else (host["state"], f"{host['silent_seconds']:g} s")
        first = (name, *state)
        for name_of_engine in own:
            engine = engines[name_of_engine]
            state_of_engine = f"{engine['state']}, leaving" if engine["leaving"] else str(engine["state"])
            step = "" if engine["step"] is None else f"{engine['step']}, {engine['step_seconds']:.0f} s"
            counts = (str(engine["in_flight"]), str(engine["restarts"]))
            rows.append((*first, name_of_engine, state_of_engine, step, *counts))
            first = ("", "", "")
        if not own:
            rows.append((*first, "none", "", "", "", ""))
    yield from _align(rows)
    yield from (host["error"].removeprefix("its ") for host in hosts.values() if host["error"])
    yield from _list_errors(engines, hosts, places)


def _list_errors(
    engines: Mapping[str, Mapping[str, Any]], hosts: Mapping[str, Mapping[str, Any]], places: Mapping[str, str]
) -> Iterator[str]:
    """Yield the errors of engines that are not up; the loss of a host is not an error of its engines."""
    for name, engine in engines.items():
        host = places.get(name)
        if not engine["error"] or engine["state"] in _UP:
            continue
        if host is None or f"its host {host}" not in engine["error"]:
            yield engine["error"]
        elif not hosts[host]["error"]:
            yield f"engine {name} is started again: its host {host} is back"


def describe_ranks(places: ReadPlaces | None) -> Iterator[str]:
    """Yield the lines for the places of ranks: a line for each host."""
    if places is None:
        return
    yield ""
    hosts: dict[str, dict[str, list[int]]] = {}
    for rank, place in sorted(places.ranks.items()):
        hosts.setdefault(place.host, {}).setdefault(place.part, []).append(rank)
    rows = [_TITLES_OF_RANKS]
    for host, parts in hosts.items():
        doing = []
        for part, ranks in parts.items():
            seconds = max(places.ranks[rank].seconds for rank in ranks)
            doing.append(f"{part} {seconds:.0f} s" + (f" ({_name_ranks(ranks)})" if len(parts) > 1 else ""))
        rows.append((host, _name_ranks(sorted(rank for ranks in parts.values() for rank in ranks)), ", ".join(doing)))
    yield from _align(rows)
    if places.seconds > _PATIENCE_SECONDS:
        yield f"rank 0 has not reported what ranks do for {places.seconds:.0f} s: it is stopped, or the run has ended"


def _name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks in ascending order, those in a row by the first and the last."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _align(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()


def _ask(folder: Path) -> Mapping[str, Any]:
    with RolloutClient(
        (folder / _ADDRESS).read_text().strip(), read_token(folder / _TOKEN), _PATIENCE_SECONDS
    ) as client:
        return client.status()
