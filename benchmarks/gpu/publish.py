"""Time publishes by their parts: the trainer's until the sidecar is told, and the engine's steps, from its trace.

The weights change between two publishes, and both sides prove what they hold. A trainer of one rank has no optimizer.
"""

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.gpu import engine
from benchmarks.gpu.work import Work
from benchmarks.publish import SHARED, Publishing, publishing
from megatron_rl import platforms
from megatron_rl.observe.trace import SERVICE, Span, read_trace
from tests.sidecar.sidecar_process import sidecar

NUM_ROUNDS = 4
STEPS = ("pause", "load", "commit", "probe", "open")
# A publish has its files and those of the version before.
NUM_COPIES = 2.2
# Bytes of keys and values for the probe alone.
SMALL_CACHE = 1 << 30


@dataclasses.dataclass(frozen=True)
class Moment:
    """A publish as the trainer sees it, in seconds since the epoch."""

    version: int
    begin: float
    end: float


def measure(work: Work) -> None:
    """Add the row of the work's model."""
    platforms.select(work.device).install()
    name = "tiny" if work.is_tiny else work.size
    if lack := find_lack(work):
        work.leave_out("publish", name, lack)
        return
    with tempfile.TemporaryDirectory() as temporary:
        model, run = work.make_model(), Path(temporary) / f"publish-{os.getpid()}"
        # It publishes alone, so that nothing is compiled or captured for generation.
        words = engine.list_words_of_sidecar(work, model, 8, SMALL_CACHE, "--enforce-eager")
        if work.is_tiny:
            # On the CPU the part `service` publishes to an engine of vLLM.
            words += ["--rollout-engine", "scripted"]
        with sidecar(run, *words, "--reward", "length:8"), publishing(model, run, work.device) as trainer:
            moments = publish_rounds(trainer, work)
        # The sidecar writes its trace as it ends.
        add_row(work, name, run, moments, trainer)


def find_lack(work: Work) -> str:
    """Return the reason that the model's files have no room; empty if they have."""
    num_bytes = engine.count_bytes(work.architecture)
    for place, wanted in ((SHARED, NUM_COPIES * num_bytes), (work.folder, num_bytes)):
        if (free := engine.find_room(place)) < wanted:
            return f"{place} has {free / 1e9:.0f} GB free, and {wanted / 1e9:.0f} are needed"
    return ""


def publish_rounds(trainer: Publishing, work: Work) -> list[Moment]:
    """Publish several versions; the first starts what the others find running, and is not returned."""
    moments = []
    for version in range(1 if work.is_tiny else NUM_ROUNDS):
        moments.append(publish_once(trainer, version))
        trainer.change()
    moments.append(publish_once(trainer, len(moments)))
    return moments[1:]


def publish_once(trainer: Publishing, version: int) -> Moment:
    """Publish the weights as a version."""
    begin = time.time()
    trainer.publisher.publish(version)
    return Moment(version, begin, time.time())


def count_bytes(trainer: Publishing) -> int:
    """Return the bytes of the weights that are published."""
    return sum(shard.parameter.nbytes for shard in trainer.weights.shards)


def add_row(work: Work, name: str, run: Path, moments: Sequence[Moment], trainer: Publishing) -> None:
    """Add the medians of the parts of publishes that the sidecar has recorded."""
    process = read_trace(run).sidecar
    assert process is not None
    spans = [span for window in process.windows for span in window.spans]
    parts = [divide(moment, spans) for moment in moments]
    figures = {part: statistics.median(one[part] for one in parts) for part in parts[0]}
    gigabytes = count_bytes(trainer) / 1e9
    note = f"{gigabytes:.2f} GB, by {trainer.publisher.answer.through}"
    work.add("publish", name, note, **figures, gbps=gigabytes / figures["seconds"])


def divide(moment: Moment, spans: Iterable[Span]) -> dict[str, float]:
    """Divide a publish into seconds that add up to all of it: those before the sidecar is told, its steps, the rest."""
    spans = list(spans)
    (told,) = (s for s in spans if s.lane == SERVICE and s.name == "publish" and s.number == moment.version)
    within = [s for s in spans if s.name in STEPS and told.begin <= s.begin and s.end <= told.end]
    seconds = moment.end - moment.begin
    parts = {"announce": told.begin - moment.begin}
    parts |= {step: sum(span.seconds for span in within if span.name == step) for step in STEPS}
    return {"seconds": seconds, **parts, "other": seconds - sum(parts.values())}
