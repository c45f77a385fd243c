"""A rank that fails or is lost ends all ranks, with one reason: none is left waiting for it.

Before anything else, every rank connects to rank 0 (`lifelines.py`). The first reason that reaches rank 0 is the run's:
rank 0 tells all ranks, and each ends its process when told, whatever it is doing. A rank is lost when its connection
breaks.

Ranks that all make no progress for too long end too: one of them is in a collective that does not end. A collective's
own timeout cannot notice this soon: a rank may wait in one for as long as another waits for a slot. So every rank says
now and then where it is, and rank 0 looks whether any made progress, or waits for another process.
"""

import abc
import collections
import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from megatron_rl.errors import ExitCode, MegatronRLError, PlatformError
from megatron_rl.trainer.loop.lifelines import Hub, Lines, Message, Spoke, listen

if TYPE_CHECKING:
    import torch.distributed as dist

    from megatron_rl.observe.rank_places import RankPlaces

_LOST = "its process ended without a message: it was killed, or its host cannot be reached"
_KEY = "megatron_rl/watch"
# Another rank's failure may first show as a broken connection; the rank's own reason arrives soon after.
_REASON_SECONDS = 1.0
# Rank 0 answers at once, unless it is lost too.
_ANSWER_SECONDS = 3.0
_MISSING_SECONDS = 20.0
# Ranks started together connect in a moment; the imports that follow leave the connecting thread little time.
_GREETING_SECONDS = 2.0
# Ranks of one run are started together: one that connects late can still learn of a failure for this long.
_LATE_SECONDS = 10.0
# In these parts of an iteration a rank waits for something that has a deadline of its own.
_WITH_A_DEADLINE = ("wait", "publish", "evaluate", "save")
# The number of times that a rank says where it is within the time that it may stay there.
_NUM_REPORTS = 20
# Ranks say it more often for people who look at the run's hosts; rank 0 receives this many a second at most.
_SECONDS_BETWEEN_REPORTS = 2.0
_MOST_REPORTS_A_SECOND = 500


class Followed:
    """The run of this process; this class stands for a run that has not begun."""

    @property
    def place(self) -> tuple[int, str]:
        """The number of steps so far, and the part of an iteration that runs now; any thread may ask."""
        return 0, "other"

    def tidy(self) -> None:
        """Clean up a process that is being ended; it must take no more than a moment."""

    def describe_interrupt(self) -> str:
        """Return what an interrupt loses, and how to resume."""
        return "no iteration had begun, and nothing is lost"


class Loop(Followed):
    """The loop of a rank: a run's, or a service's."""

    @property
    def is_saving(self) -> bool:
        """Check whether a checkpoint is being written, which an end of the sidecar lets finish."""
        return self.place[1] == "save"

    @abc.abstractmethod
    def train(self) -> int:
        """Run to the end; return the version reached."""


class Failure(NamedTuple):
    """The reason for which the run ended, and the rank where it happened first."""

    reason: str
    rank: int
    exit_code: int
    speaker: int
    """The rank that reports the failure: the one that failed, or the one that noticed."""
    place: str
    """The place to which the speaker prints: a rank that prints to the same place need not repeat it."""

    def __str__(self) -> str:
        return f"{self.reason} (rank {self.rank})"


class Stalls:
    """The last known place of every rank, and the seconds since one of them changed; on rank 0."""

    def __init__(self, most_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.most_seconds = most_seconds
        self._clock = clock
        self._places: dict[int, tuple[int, str]] = {}
        self._since = clock()

    def receive(self, rank: int, num_steps: int, part: str) -> None:
        """Note that a rank is in this part of an iteration, after `num_steps` steps."""
        place = num_steps, part
        if self._places.get(rank) != place or part in _WITH_A_DEADLINE:
            self._since = self._clock()
        self._places[rank] = place

    def find(self) -> str | None:
        """Return the reason to end if no rank makes progress; None if one does, or waits for another process."""
        if self._clock() - self._since <= self.most_seconds:
            return None
        ranks = collections.defaultdict(list)
        for rank, (_, part) in sorted(self._places.items()):
            ranks[part].append(str(rank))
        where = "; ".join(f"{', '.join(of_part)} in {part}" for part, of_part in ranks.items())
        return (
            f"no rank has made progress for {self.most_seconds / 60:g} minutes, and none waits for engines (ranks "
            f"{where}). Look at each of them (py-spy dump --pid), and at the network between them. If a micro-batch "
            "takes that long, raise --distributed-timeout-minutes"
        )


class Watch(contextlib.AbstractContextManager["Watch"]):
    """A context around the ranks' joint work: within it, once connected, a rank learns of the others' failures."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self._followed = Followed()
        self._lines: Lines | None = None
        self._lock = threading.Lock()
        self._first: Failure | None = None
        self._decided = threading.Event()
        self._done: set[int] = set()
        self._store_port = 0
        self._has_store = threading.Event()
        self._stalls: Stalls | None = None
        self._places: RankPlaces | None = None
        self._closed = threading.Event()

    @classmethod
    def of_environment(cls) -> "Watch":
        """Make the watch of the rank that the environment names. Without torchrun, connect it at once."""
        watch = cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
        if watch.world_size > 1 and not meets_in_an_agent() and {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            watch.connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            if watch._lines is not None and watch.rank != 0:
                watch._lines.wait_until_told(_GREETING_SECONDS)
        return watch

    def connect(self, host: str, port: int) -> None:
        """Listen at this address, on rank 0; on the others, connect to rank 0 as soon as it listens."""
        if self.rank == 0:
            try:
                listener = listen(host, port)
            except OSError as error:
                raise PlatformError(
                    f"MASTER_PORT {port}: rank 0 cannot listen there ({error}): choose a free port of this host"
                ) from None
            self._lines = Hub(listener, self.world_size - 1, self)
        else:
            self._lines = Spoke(host, port, self.rank, self)
        waiting = threading.Thread(target=self._name_missing, args=(self._lines, f"{host}:{port}"), daemon=True)
        waiting.start()

    def connect_through(self, store: "dist.Store") -> None:
        """Connect if MASTER_PORT is torchrun's store: rank 0 writes into the store where it listens."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if self.rank != 0:
            own_host, _, own_port = store.get(_KEY).decode().rpartition(":")
            self.connect(own_host, int(own_port))
            return
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as to_the_store:
            to_the_store.connect((host, port))
            own = to_the_store.getsockname()[0]
        # If rank 0 reaches the store by the loopback, it is on the store's host, which the others know by name.
        own = host if own.startswith("127.") else own
        listener = listen(own, 0)
        self._lines = Hub(listener, self.world_size - 1, self)
        store.set(_KEY, f"{own}:{listener.getsockname()[1]}")

    def _name_missing(self, lines: Lines, place: str) -> None:
        """Name the ranks that have not connected: each may still connect, or may have ended before."""
        if not lines.wait_until_told(_MISSING_SECONDS):
            ranks = ", ".join(map(str, lines.missing))
            print(
                f"megatron_rl: rank {self.rank} has waited {_MISSING_SECONDS:g} s at {place} for rank {ranks}, which "
                "has not connected: check that it was started, and read its output",
                file=sys.stderr,
                flush=True,
            )

    @property
    def is_connected(self) -> bool:
        """Whether the other ranks learn of this one's end."""
        return self._lines is not None

    def say_store(self, port: int) -> None:
        """Tell the others the port of torch's store; only rank 0 calls this."""
        assert self._lines is not None
        self._lines.tell("store", port)

    def store_port(self, seconds: float) -> int | None:
        """Return the port of torch's store that rank 0 names; None if it names none within `seconds`."""
        return self._store_port if self._has_store.wait(seconds) else None

    def follow(self, run: Followed, most_seconds: float, places: "RankPlaces | None" = None) -> None:
        """End all ranks if none makes progress for `most_seconds`; tidy the run if this process is being ended.

        On rank 0, `places` shows what every rank does.
        """
        self._followed, self._places = run, places
        if self._lines is None and places is None:
            return
        if self.rank == 0 and self._lines is not None:
            self._stalls = Stalls(most_seconds)
        often = max(_SECONDS_BETWEEN_REPORTS, self.world_size / _MOST_REPORTS_A_SECOND)
        pause = min(often, most_seconds / _NUM_REPORTS)
        threading.Thread(target=self._say_places, args=(pause,), name="places", daemon=True).start()

    def _say_places(self, pause: float) -> None:
        host = socket.gethostname()
        while not self._closed.wait(pause):
            num_steps, part = self._followed.place
            if self.rank != 0:
                assert self._lines is not None
                self._lines.mention("at", self.rank, num_steps, part, host)
                continue
            self._hear_place(0, num_steps, part, host)
            if self._places is not None:
                self._places.write()
            reason = None if self._stalls is None else self._stalls.find()
            if reason is not None:
                self._end(self._decide(self._failure(reason, self.rank, ExitCode.RUN)))

    def _hear_place(self, rank: int, num_steps: int, part: str, host: str) -> None:
        if self._places is not None:
            self._places.note(rank, host, num_steps, part)
        if self._stalls is not None:
            self._stalls.receive(rank, num_steps, part)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def close(self) -> None:
        """Tell the others that this rank is done, and stop listening to them."""
        self._closed.set()
        if self._places is not None:
            self._places.remove()
        if self._lines is not None:
            self._lines.tell("done", self.rank)
            self._lines.close()

    def fail(self, error: BaseException) -> NoReturn:
        """End this rank, and with it all ranks, for the reason of the rank that failed first."""
        if not isinstance(error, MegatronRLError | KeyboardInterrupt):
            self._decided.wait(_REASON_SECONDS)
            print("".join(traceback.format_exception(error)), file=sys.stderr)
        self._end(self.tell(error))

    def tell(self, error: BaseException, timeout: float = 0.0) -> Failure:
        """Tell the other ranks why this one ends; return the reason for which all of them end.

        For `timeout` seconds rank 0 may be first to say what it finds itself.
        """
        if isinstance(error, KeyboardInterrupt):
            own = self._failure(f"interrupted: {self._followed.describe_interrupt()}", self.rank, ExitCode.INTERRUPTED)
        elif isinstance(error, MegatronRLError):
            own = self._failure(str(error), self.rank, error.exit_code)
        else:
            own = self._failure(f"{type(error).__name__}: {error}", self.rank, ExitCode.CRASH)
        if self._lines is None:
            return own
        if self.rank == 0:
            return self._decide(own)
        self._decided.wait(timeout)
        self._lines.tell("failed", *own)
        self._decided.wait(_ANSWER_SECONDS)
        return self._first or own

    def leave(self, error: MegatronRLError) -> None:
        """Tidy the run, and tell the other ranks why this one ends."""
        try:
            self._followed.tidy()
        finally:
            self.tell(error)

    # Called by the connections, in their own thread.

    def receive(self, message: Message) -> None:
        match message:
            case ["failed", str(reason), int(rank), int(exit_code), int(speaker), str(place)]:
                self._failed(Failure(reason, rank, exit_code, speaker, place))
            case ["done", int(rank)]:
                self._done.add(rank)
            case ["at", int(rank), int(num_steps), str(part), str(host)]:
                self._hear_place(rank, num_steps, part, host)
            case ["store", int(port)]:
                self._store_port = port
                self._has_store.set()

    def lost(self, rank: int) -> None:
        if rank not in self._done:
            self._failed(self._failure(_LOST, rank, ExitCode.RUN))

    def _failure(self, reason: str, rank: int, exit_code: int) -> Failure:
        return Failure(reason, rank, int(exit_code), self.rank, _place_of_errors())

    def _failed(self, failure: Failure) -> None:
        if self.rank == 0:
            # Not in this thread, which must still accept ranks that connect late.
            threading.Thread(target=lambda: self._obey(self._decide(failure)), daemon=True).start()
            return
        self._first = self._first or failure
        self._decided.set()
        self._obey(self._first)

    def _obey(self, failure: Failure) -> None:
        # The rank that failed first ends itself.
        if failure.rank != self.rank:
            self._end(failure)

    def _decide(self, failure: Failure) -> Failure:
        """Make the first failure the run's, tell all ranks, and return it; only rank 0 calls this."""
        assert self._lines is not None
        with self._lock:
            if self._first is None:
                self._first = failure
                self._lines.tell("failed", *failure)
        self._decided.set()
        self._lines.wait_until_told(_LATE_SECONDS)
        return self._first

    def _end(self, failure: Failure) -> NoReturn:
        """End the process at once: a thread that waits in a collective cannot be asked to leave it."""
        # Never released: another thread that wants to end this process waits until it has ended.
        self._lock.acquire()
        if failure.speaker == self.rank or failure.place != _place_of_errors():
            # In one write: another thread may be printing its error.
            print(f"megatron_rl: the run ended: {failure}\n", end="", file=sys.stderr)
        if failure.speaker == self.rank:
            tell_launcher(str(failure))
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
            self._followed.tidy()
        os._exit(failure.exit_code)


def tell_launcher(reason: str) -> None:
    """Have torchrun print `reason` as the root cause, at the very end: it takes the earliest error of all ranks."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        # torchrun reads whole seconds. One less is before the ranks that end, in the same second, because of this one.
        extra = {"py_callstack": reason, "timestamp": str(int(time.time()) - 1)}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": reason, "extraInfo": extra}}))


def _place_of_errors() -> str:
    """Return a text that identifies standard error: equal for the same terminal, file or pipe of the same host."""
    try:
        found = os.fstat(2)
    except OSError:
        return f"none of process {os.getpid()}"
    return f"{socket.gethostname()} {found.st_dev} {found.st_ino}"


def meets_in_an_agent() -> bool:
    """Return whether torchrun hosts the store, and so holds its port."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
